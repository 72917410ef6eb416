"""The style sheet of the report: dark on light, one column, readable on a phone and in print."""

CSS = """
:root{--ink:#1f2937;--muted:#6b7280;--faint:#9ca3af;--rule:#e5e7eb;--wash:#f8fafc;--paper:#fff;--before:#94a3b8;
--after:#2563eb;--held:#d97706;--good:#2f855a;--bad:#c83e3e;--warn:#b7791f}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--wash);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",
Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1120px;margin:0 auto;padding:0 20px 64px}
header.top{padding:36px 0 8px}
h1{font-size:30px;line-height:1.2;margin:0;letter-spacing:-.015em;overflow-wrap:anywhere}
h2{font-size:19px;margin:0 0 4px;letter-spacing:-.01em}
h3{font-size:15px;margin:22px 0 6px}
p{margin:4px 0}
.summary{color:var(--muted);margin:6px 0 0;max-width:75ch}
.note{color:var(--muted);font-size:14px;max-width:80ch;margin:0 0 14px}
.chips{display:flex;flex-wrap:wrap;gap:8px;margin:14px 0 0;padding:0;list-style:none}
.chips li{background:var(--paper);border:1px solid var(--rule);border-radius:99px;padding:2px 12px;font-size:13.5px;
overflow-wrap:anywhere}
.chips b{font-weight:500;color:var(--muted);margin-right:6px}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:14px;margin:20px 0 0}
nav a{color:var(--muted);text-decoration:none}nav a:hover{color:var(--after)}
section{background:var(--paper);border:1px solid var(--rule);border-radius:12px;padding:22px 24px;margin:18px 0 0}
.verdict{display:grid;grid-template-columns:auto 1fr;gap:6px 32px;align-items:center;border-left:5px solid var(--faint)}
.verdict.better{border-left-color:var(--good)}.verdict.worse{border-left-color:var(--bad)}
.verdict.unclear{border-left-color:var(--warn)}
.big{font-size:40px;line-height:1.1;font-weight:650;letter-spacing:-.02em;white-space:nowrap}
.big .from{color:var(--before)}.big .arrow{color:var(--faint);font-weight:400;padding:0 8px}
.verdict strong{font-size:17px}.verdict.better strong{color:var(--good)}.verdict.worse strong{color:var(--bad)}
.plots{display:grid;gap:14px 20px}.plots.two{grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr))}
.plots.three{grid-template-columns:repeat(auto-fill,minmax(min(100%,280px),1fr))}
.plots svg{width:100%;height:auto;display:block}
.plots svg text{font-family:inherit!important}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14.5px}
th{font-weight:500;color:var(--muted);text-align:left;font-size:13px;border-bottom:1px solid var(--rule);
padding:6px 12px 6px 0;white-space:nowrap}
td{padding:7px 12px 7px 0;border-bottom:1px solid var(--rule);vertical-align:top}
tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;white-space:nowrap}
tr.head td{font-weight:600}
.pos{color:var(--good);font-weight:600}.neg{color:var(--bad);font-weight:600}
.range{color:var(--muted);font-weight:400;white-space:nowrap}
td.bar{width:26%;min-width:170px;padding-top:11px}
.span{position:relative;height:10px;background:linear-gradient(var(--rule),var(--rule)) center/100% 2px no-repeat}
.span i{position:absolute;top:4px;height:2px;background:var(--after);opacity:.55}
.span b{position:absolute;top:0;width:10px;height:10px;margin-left:-5px;border-radius:50%;background:var(--after)}
.span b.b{background:var(--paper);border:2.5px solid var(--before)}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:18px 20px}
figure{margin:0}
figure .pair{display:grid;grid-template-columns:1fr 1fr;gap:4px}
figure img{width:100%;display:block;border-radius:6px;border:1px solid var(--rule);background:var(--wash)}
figure img.tiny{image-rendering:pixelated}
.scores{display:grid;grid-template-columns:1fr 1fr;gap:4px;font-size:13px;margin-top:4px}
figcaption{font-size:13.5px;color:var(--muted);line-height:1.4;margin-top:1px;overflow-wrap:anywhere}
.dot{display:inline-block;width:9px;height:9px;border-radius:2.5px;margin-right:6px}
td.text{width:36%;min-width:220px}
.said{white-space:pre-wrap;overflow-wrap:anywhere;max-height:230px;overflow-y:auto;
font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.stack{display:flex;height:26px;border-radius:6px;overflow:hidden;margin:4px 0 12px}
.stack i{display:block;min-width:1px}
.legend{display:flex;flex-wrap:wrap;gap:4px 22px;font-size:14px;margin:0 0 6px;padding:0;list-style:none}
.legend span{color:var(--muted)}
.badge{display:inline-block;border-radius:5px;padding:0 8px;font-size:12.5px;font-weight:600;line-height:20px;color:#fff;
background:var(--faint)}
.badge.ok{background:var(--good)}.badge.warn{background:var(--warn)}.badge.failed,.badge.stop{background:var(--bad)}
details summary{cursor:pointer;font-weight:600}
pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-x:auto;margin:12px 0 0}
footer{color:var(--faint);font-size:13px;margin-top:24px}
@media(max-width:640px){main{padding:0 12px 40px}section{padding:18px 16px}.verdict{grid-template-columns:1fr}
.big{font-size:32px}h1{font-size:24px}
.gallery{grid-template-columns:repeat(auto-fill,minmax(min(100%,160px),1fr))}td.bar,th.bar{display:none}}
@media print{body{background:#fff}section{break-inside:avoid;border:0;padding:12px 0}nav{display:none}}
"""
