"""How the report looks: one style sheet, in light and in dark, from 400 pixels on."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #f7f7f5; --card: #fff; --ink: #1d2126; --soft: #626a73; --rule: #e2e4e7;
  --sound: #3f8f88; --unjudged: #aab1b9; --cut: #e2a42f; --unasked: #8d6bb1;
  --empty: #f08a93; --missing: #cc1f36; --plot: #5d7fa8; --tint: 204, 31, 54;
  --good: #2b756f; --bad: #b3142b; --warn: #8a5a00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #121517; --card: #1a1e22; --ink: #e4e7ea; --soft: #98a1aa; --rule: #2c3238;
    --sound: #4ba39b; --unjudged: #616a73; --cut: #e5ad45; --unasked: #a988cc;
    --empty: #f59aa4; --missing: #ff4257; --plot: #7ba0cc; --tint: 255, 66, 87;
    --good: #62bdb4; --bad: #ff7381; --warn: #e5ad45;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1120px; margin: 0 auto; padding: 28px 24px 64px; }
a { color: inherit; text-decoration-color: var(--soft); text-underline-offset: 2px; }
.trail { color: var(--soft); margin: 0 0 4px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 8px; letter-spacing: -.01em; }
h1.bad { color: var(--bad); }
h2 { font-size: 18px; margin: 0 0 2px; }
h3 { font-size: 15px; margin: 0; font-weight: 600; }
p { margin: 0 0 8px; }
.note, .soft { color: var(--soft); }
.note { max-width: 74ch; margin-bottom: 14px; }
.lead { font-size: 17px; max-width: 92ch; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.bad { font-weight: 600; } .some { color: var(--bad); }
section {
  background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 18px 20px 20px; margin-top: 18px;
}
.refused { border-left: 4px solid var(--missing); padding: 4px 0 4px 14px; margin: 12px 0; }
.refused p { margin: 0; max-width: 84ch; }

.glance {
  display: grid; grid-template-columns: minmax(0, max-content) 1fr auto auto;
  gap: 10px 16px; align-items: center;
}
.glance .name { font-weight: 600; overflow-wrap: anywhere; }
.glance .head { color: var(--soft); font-size: 13px; }
.glance .share { text-align: right; font-size: 17px; } .glance .bad { font-weight: 700; }
.glance .count { text-align: right; color: var(--soft); }
.bar { display: block; width: 100%; height: 22px; border-radius: 3px; background: var(--rule); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 14px 0 0; padding: 0;
  list-style: none; color: var(--soft); font-size: 13px; }
.legend li::before { content: ""; display: inline-block; width: 11px; height: 11px;
  border-radius: 2px; margin-right: 7px; vertical-align: -1px; background: var(--own); }
.sound { fill: var(--sound); --own: var(--sound); }
.unjudged { fill: var(--unjudged); --own: var(--unjudged); }
.cut { fill: var(--cut); --own: var(--cut); }
.unasked { fill: var(--unasked); --own: var(--unasked); }
.empty { fill: var(--empty); --own: var(--empty); }
.missing { fill: var(--missing); --own: var(--missing); }

dl.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr));
  gap: 16px 24px; margin: 0; }
dl.tiles dt { color: var(--soft); font-size: 13px; }
dl.tiles dd { margin: 0; font-size: 22px; font-weight: 600; line-height: 1.25; }
dl.tiles dd small { display: block; font-size: 13px; font-weight: 400; color: var(--soft);
  line-height: 1.4; }

.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr));
  gap: 18px 28px; }
.plots + .plots { border-top: 1px solid var(--rule); padding-top: 12px; margin-top: 12px; }
.titled { grid-template-columns: 11em repeat(3, minmax(0, 1fr)); gap: 8px 28px; }
.titled > h3 { font-size: 14px; overflow-wrap: anywhere; }
.titled figcaption { display: block; } .titled figcaption span { display: block; }
figure { margin: 0; }
figcaption { display: flex; justify-content: space-between; gap: 12px; font-size: 13px; }
figcaption b { font-weight: 600; }
figure svg { display: block; width: 100%; height: auto; margin-top: 4px; }
.column { fill: var(--plot); } .column:hover { fill: var(--ink); }
.axis { stroke: var(--rule); stroke-width: 1; vector-effect: non-scaling-stroke; }
.median { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 3 2; }
.tick { fill: var(--soft); font-size: 10.5px; }
.nothing { color: var(--soft); border-top: 1px solid var(--rule); padding: 26px 0; margin-top: 4px;
  text-align: center; font-size: 13px; }

.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 400; color: var(--soft); font-size: 13px;
  vertical-align: bottom; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--rule); }
td { vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; white-space: nowrap; }
td small { display: block; color: var(--soft); font-size: 13px; max-width: 60ch; }
td .bar { height: 8px; min-width: 70px; margin-top: 7px; }
.kind { font-weight: 600; white-space: nowrap; }
.matrix td, .matrix th { padding: 6px 10px; }
.matrix td:first-child, .matrix th:first-child { padding-left: 0; }
.cell { display: block; margin: -6px -10px; padding: 6px 10px; border-radius: 3px; }
.cell:empty { display: none; }
.examples { padding-left: 18px; } .examples code { display: block; white-space: nowrap; }
th.text:last-child { padding-left: 18px; }
.shares td:nth-child(even) { width: 30%; }

details { border-top: 1px solid var(--rule); }
details:last-of-type { border-bottom: 1px solid var(--rule); }
summary { cursor: pointer; padding: 9px 0; display: grid; gap: 2px 14px;
  grid-template-columns: 5.5em minmax(0, 1fr) auto; align-items: baseline; }
summary::-webkit-details-marker { display: none; }
summary .id { color: var(--soft); text-align: right; font: 13px/1.5 ui-monospace, monospace;
  overflow-wrap: anywhere; }
summary .id::after { content: "+"; display: inline-block; width: 1.6em; text-align: right; }
details[open] .id::after { content: "\\2013"; }
.sample { padding: 0 0 16px; } .sample p { margin: 6px 0 0; }
.sample h3 { color: var(--soft); font-size: 13px; font-weight: 400; margin: 12px 0 2px; }
pre { margin: 0; padding: 9px 12px; background: var(--paper); border-radius: 5px;
  border-left: 3px solid var(--rule); white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.5 ui-monospace, "Liberation Mono", monospace; }
pre.thinking { border-left-color: var(--sound); } pre.answer { border-left-color: var(--plot); }
pre i { font-style: normal; color: var(--unasked); }
code { font: 13px ui-monospace, "Liberation Mono", monospace; overflow-wrap: anywhere; }

@media (max-width: 640px) {
  main { padding: 18px 12px 40px; }
  h1 { font-size: 23px; }
  section { padding: 14px 13px 16px; }
  .glance { grid-template-columns: 1fr auto; gap: 2px 12px; grid-auto-flow: dense; }
  .glance .head { display: none; }
  .glance .share { grid-column: 2; }
  .titled { grid-template-columns: 1fr; }
  .shares td:nth-child(even), .shares th:nth-child(even) { display: none; }
  .glance .bar { grid-column: 1 / -1; }
  .glance .count { grid-column: 1 / -1; text-align: left; margin-bottom: 12px; font-size: 13px; }
  summary { grid-template-columns: 1fr auto; }
  summary .id { grid-column: 1 / -1; text-align: left; }
}
@media print { body { background: none; } section { break-inside: avoid; } }
"""
