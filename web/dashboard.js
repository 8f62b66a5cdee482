// The dashboard: reads /metrics every two seconds while it is shown, and draws what changed since.
import {readMetrics} from "/api.js";
import {settings} from "/store.js";

const PERIOD = 2000, KEPT = 90, CLASSES = ["P0", "P1", "P2"], NAMES = {P0: "interactive", P1: "batch", P2: "best effort"};
const SVG = "http://www.w3.org/2000/svg";
let timer = 0, last = null, root = null;
const speed = [];  // {prompt, output} tokens/s of past periods

// The text format of Prometheus: one sample a line.
export function parseMetrics(text) {
  const out = [];
  for (const line of text.split("\n")) {
    const m = line.match(/^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/);
    if (!m) continue;
    const labels = {};
    for (const [, key, value] of (m[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[key] = value;
    out.push({name: m[1], labels, value: m[3] === "+Inf" ? Infinity : Number(m[3])});
  }
  return out;
}

class Snapshot {
  constructor(text) { this.samples = parseMetrics(text); this.time = performance.now(); }
  value(name, labels = {}) {
    const found = this.samples.filter((s) => s.name === name && Object.entries(labels).every(([k, v]) => s.labels[k] === v));
    return found.reduce((sum, s) => sum + s.value, 0);
  }
  // [{edge, count}] of a histogram, not cumulative, all label sets together.
  buckets(name, labels = {}) {
    const sums = new Map();
    for (const s of this.samples) {
      if (s.name !== `${name}_bucket` || !Object.entries(labels).every(([k, v]) => s.labels[k] === v)) continue;
      const edge = s.labels.le === "+Inf" ? Infinity : Number(s.labels.le);
      sums.set(edge, (sums.get(edge) ?? 0) + s.value);
    }
    let below = 0;
    return [...sums].sort((a, b) => a[0] - b[0]).map(([edge, sum]) => { const count = sum - below; below = sum; return {edge, count}; });
  }
}

function svg(name, attributes, ...children) {
  const e = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  e.append(...children);
  return e;
}

function node(name, className, ...children) {
  const e = document.createElement(name);
  if (className) e.className = className;
  e.append(...children);
  return e;
}

function number(v) { return v >= 1e6 ? `${(v / 1e6).toFixed(1)} M` : v >= 100 || Number.isInteger(v) ? Math.round(v).toLocaleString("en") : v.toFixed(1); }
function seconds(v) { return v === Infinity ? "∞" : v < 1 ? `${+(v * 1000).toPrecision(2)}\u00a0ms` : `${+v.toPrecision(2)}\u00a0s`; }

function card(title, ...children) { return node("article", "card", node("h2", "", title), ...children); }
function big(text, unit) { return node("div", "value", text, node("small", "", ` ${unit}`)); }

function lines(series, colours) {
  const W = 300, H = 80, top = Math.max(1, ...series.flat());
  const path = (values) => values.map((v, i) => `${i ? "L" : "M"}${(W * (i + KEPT - values.length) / (KEPT - 1)).toFixed(1)} ${(H - H * v / top).toFixed(1)}`).join("");
  return svg("svg", {viewBox: `0 0 ${W} ${H + 8}`, preserveAspectRatio: "none", role: "img", "aria-label": "Course of the last three minutes"},
             svg("line", {x1: 0, x2: W, y1: H + 1, y2: H + 1, stroke: "var(--line)", "vector-effect": "non-scaling-stroke"}),
             ...series.map((values, i) => svg("path", {d: path(values), fill: "none", stroke: colours[i], "stroke-width": 2, "vector-effect": "non-scaling-stroke"})));
}

function histogram(buckets) {
  const used = buckets.findLastIndex((b) => b.count > 0), first = buckets.findIndex((b) => b.count > 0);
  if (used < 0) return node("p", "legend", "Nothing measured yet.");
  const shown = buckets.slice(Math.max(0, first - 1), Math.min(buckets.length, used + 2)), top = Math.max(...shown.map((b) => b.count));
  const W = 300, H = 70, w = W / shown.length, step = Math.ceil(shown.length / 7);
  const bars = shown.map((b, i) => svg("rect", {x: i * w + 1, y: H - H * b.count / top, width: Math.max(1, w - 2), height: H * b.count / top, rx: 2, fill: "var(--accent)"},
                                       svg("title", {}, `up to ${seconds(b.edge)}: ${b.count}`)));
  const labels = shown.map((b, i) => (i % step ? "" : svg("text", {x: i * w + w / 2, y: H + 14, class: "axis", "text-anchor": "middle"}, seconds(b.edge)))).filter(Boolean);
  return svg("svg", {viewBox: `0 0 ${W} ${H + 20}`, role: "img", "aria-label": "Histogram"}, ...bars, ...labels);
}

function quantile(buckets, q) {
  const total = buckets.reduce((sum, b) => sum + b.count, 0);
  let seen = 0;
  for (const b of buckets) if ((seen += b.count) >= q * total && total > 0) return b.edge;
  return NaN;
}

function quantiles(buckets) {
  const text = (q) => { const v = quantile(buckets, q); return Number.isNaN(v) ? "–" : `≤\u00a0${seconds(v)}`; };
  return node("p", "legend", `half ${text(0.5)} · 95% ${text(0.95)} · 99% ${text(0.99)}`);
}

function draw(now) {
  const gap = last ? (now.time - last.time) / 1000 : 0;
  const rate = (name) => (last && gap > 0 ? Math.max(0, (now.value(name) - last.value(name)) / gap) : 0);
  if (last) {
    speed.push({prompt: rate("vllm:prompt_tokens_total"), output: rate("vllm:generation_tokens_total")});
    if (speed.length > KEPT) speed.shift();
  }
  const latest = speed.at(-1) ?? {prompt: 0, output: 0};
  const queries = now.value("vllm:prefix_cache_queries_total"), hits = now.value("vllm:prefix_cache_hits_total");
  const used = now.value("cachalot:kv_pages_used"), cached = now.value("cachalot:kv_pages_cached"), total = now.value("cachalot:kv_pages_total");
  const share = (n) => `${total ? (100 * n / total).toFixed(1) : 0}%`;

  const rows = CLASSES.map((c) => {
    const swatch = node("span", "swatch");
    swatch.style.background = `var(--${c.toLowerCase()})`;
    const at = (name) => now.value(`cachalot:${name}`, {class: c}), kept = at("promises_kept_total"), broken = at("promises_broken_total");
    const cell = (text) => node("td", "", text);
    return node("tr", "", node("td", "", swatch, c, node("span", "class-name", ` ${NAMES[c]}`)), cell(number(at("requests_running"))), cell(number(at("requests_waiting"))), cell(number(at("preemptions_total"))),
                cell(kept + broken ? `${(100 * kept / (kept + broken)).toFixed(2)}%` : "–"));
  });
  const table = node("table", "", node("thead", "", node("tr", "", ...["Class", "running", "waiting", "pre-empted", "kept"].map((t) => node("th", "", t)))), node("tbody", "", ...rows));

  const meter = node("div", "meter"), inUse = node("span"), remembered = node("span");
  inUse.style.width = share(used);
  inUse.style.background = "var(--accent)";
  remembered.style.width = share(cached);
  remembered.style.background = "var(--line)";
  meter.append(inUse, remembered);

  const first = now.buckets("cachalot:time_to_first_token_seconds"), gaps = now.buckets("cachalot:token_gap_seconds");
  const classes = card("Requests by class", table);
  classes.classList.add("double");
  root.replaceChildren(node("div", "cards",
    card("Writing", big(number(latest.output), "tokens/s"), lines([speed.map((s) => s.output)], ["var(--accent)"])),
    card("Reading", big(number(latest.prompt), "tokens/s"), lines([speed.map((s) => s.prompt)], ["var(--p1)"])),
    card("KV cache", big(share(used), "in use"), meter, node("p", "legend", `${number(used)} of ${number(total)} pages held, ${number(cached)} more remember a prefix`)),
    card("Prefix cache", big(queries ? `${(100 * hits / queries).toFixed(1)}%` : "–", "of prompts known"), node("p", "legend", `${number(hits)} of ${number(queries)} tokens since the start`)),
    classes,
    card("Time to first token", histogram(first), quantiles(first)),
    card("Gap between tokens", histogram(gaps), quantiles(gaps)),
    card("Since the start", big(number(now.value("vllm:generation_tokens_total")), "tokens written"),
         node("p", "legend", `${number(now.value("vllm:request_success_total"))} answers · ${number(now.value("vllm:num_preemptions_total"))} pre-emptions · ${number(now.value("cachalot:engine_steps_total"))} steps`))));
  last = now;
}

async function tick() {
  try {
    draw(new Snapshot(await readMetrics(settings.key)));
  } catch (error) {
    root.replaceChildren(node("p", "notice", `No figures: ${error.message}`));
  }
  if (timer) timer = setTimeout(tick, PERIOD);
}

export function showDashboard(box) {
  root = box;
  if (timer) return;
  timer = -1;
  tick();
}

export function hideDashboard() {
  clearTimeout(timer);
  timer = 0;
  last = null;
}
