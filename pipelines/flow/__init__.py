"""Methods for flow-matching and diffusion image models."""
