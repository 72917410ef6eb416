"""Methods for text models."""
