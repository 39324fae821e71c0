// Pools: units, holders and waiting actions. One line for each pool: cores by NUMA node, devices
// with the models on them, quotas with their window, memory. Owns the panel; clicking a segment filters by its run.

import {attr, box, button, el, keyed, panel, put, putName, show, style} from "./dom.js";
import {count, counted, duration, units, unitsOf} from "./format.js";
import {HIDDEN, paintRun, putAction, putRun} from "./palette.js";

const OF_CALLS = /^(function|endpoint|instances)\//;

export function lasting(pools) {
  // Without pools of functions, which exist only during calls: temporary rows would move the rest.
  return pools.filter((pool) => !OF_CALLS.test(pool.kind));
}

const SLOTS_MAX = 64;
/* Of a bar: with more, the lines between the units would cover it. */

export class Pools {
  constructor() {
    const {root, body, note} = panel("Pools");
    this.root = root;
    this.note = note;
    this.list = el("div", "pools");
    this.empty = el("p", "empty", "Cores, memory, devices and quotas of the service are shown here.");
    body.append(this.list, this.empty);
    this.open = new Set();
  }

  update({view, place}) {
    const pools = lasting(view.pools);
    show(this.empty, pools.length === 0);
    keyed(this.list, pools, (pool) => pool.name, () => this.make(),
      (node, pool) => this.fill(node, pool, place.run));
  }

  make() {
    const node = el("div", "pool");
    const name = box("div", "pool-name", el("strong"), el("small"));
    const bars = el("div", "pool-bars");
    const held = box("div", "pool-held", el("span", "amount"), button("link quiet", ""));
    const waiting = el("span", "waiting-count");
    const holders = el("div", "holders");
    node.append(name, bars, held, waiting, holders);
    held.lastChild.addEventListener("click", () => {
      const key = node.dataset.pool;
      if (!this.open.delete(key)) this.open.add(key);
      this.holders(node, node.pool, this.run);
    });
    return node;
  }

  fill(node, pool, run) {
    this.run = run;
    node.pool = pool;
    attr(node, "data-pool", pool.name);
    const [name, bars, held, waiting] = node.children;
    putName(name.firstChild, pool.name);
    putName(name.lastChild, aside(pool));
    if (pool.unit === "devices") chunks(bars, pool, run);
    else strips(bars, pool, run);
    put(held.firstChild, unitsOf(pool.held + pool.spent, pool.total, pool.unit));
    put(waiting, pool.waiting ? `${count(pool.waiting)} waiting` : "none waiting");
    attr(waiting, "data-some", pool.waiting ? "yes" : null);
    this.holders(node, pool, run);
  }

  holders(node, pool, run) {
    const [, , held, , list] = node.children;
    const shown = run ? pool.holders.filter((holder) => holder.run === run) : pool.holders;
    const open = this.open.has(pool.name) && shown.length > 0;
    const isMemory = pool.unit === "MiB";
    const by = isMemory ? counted(shown.length, "sandbox", "sandboxes") : counted(shown.length, "action");
    put(held.lastChild, shown.length ? `by ${by}` : "");
    attr(held.lastChild, "aria-expanded", open);
    show(held.lastChild, shown.length > 0);
    show(list, open);
    keyed(list, open ? shown : [], (holder) => holder.id,
      () => box("span", "holder", button("link", ""), el("small")),
      (item, holder) => {
        paintRun(item, holder.run);
        putAction(item.firstChild, holder.id, holder.run);
        if (isMemory) sandboxLink(item.firstChild);
        put(item.lastChild, units(holder.units, pool.unit));
      });
  }
}

/** Memory is held by sandboxes, which have a page and no story. */
function sandboxLink(node) {
  attr(node, "data-action-id", null);
  attr(node, "data-page", "sandboxes");
}

function aside(pool) {
  const parts = [pool.node && pool.node !== pool.name ? pool.node : "", pool.kind === pool.name ? "" : pool.kind];
  if (pool.window_s) parts.push(`per ${duration(pool.window_s)}`);
  return parts.filter(Boolean).join(" · ");
}

// Bars.

/** One bar for each NUMA node; one in all without parts. */
function strips(node, pool, run) {
  const parts = pool.parts.length ? pool.parts : [{index: -1, total: pool.total, held: pool.held}];
  keyed(node, parts, (part) => `strip ${part.index}`,
    () => box("div", "strip", el("span", "strip-label"), el("div", "track")),
    (strip, part) => {
      put(strip.firstChild, part.index < 0 ? "" : `NUMA ${part.index}`);
      show(strip.firstChild, pool.parts.length > 1);
      style(strip, "flex-grow", String(Math.max(1, part.total)));
      track(strip.lastChild, pool, part, run);
    });
}

function track(node, pool, part, run) {
  const segments = segmentsOf(pool, part);
  const slots = pool.unit === "milli-cores" ? part.total / 1000 : 0;
  attr(node, "data-slots", slots >= 2 && slots <= SLOTS_MAX ? "yes" : null);
  if (slots) style(node, "--slot", `${100 / slots}%`);
  attr(node, "role", "group");
  const held = segments.map((one) => `${one.label} ${units(one.units, pool.unit)}`).join(", ");
  attr(node, "aria-label", `${pool.name}${part.index < 0 ? "" : ` NUMA ${part.index}`}: ${held || "nothing held"}`);
  keyed(node, segments, (one) => one.key, () => segment(), (item, one) => {
    style(item, "width", `${(100 * one.units) / Math.max(1, part.total)}%`);
    attr(item, "data-kind", one.kind);
    attr(item, "data-dim", run && one.run !== run ? "yes" : null);
    paintRun(item, one.run);
    attr(item, "data-run", one.kind === "run" && one.run !== HIDDEN ? one.run : null);
    const by = one.by ? `, ${counted(one.by, "holder")}` : "";
    attr(item, "title", `${one.label}: ${units(one.units, pool.unit)}${by}`);
  });
}

function segment() {
  const node = button("segment", "");
  node.tabIndex = -1; // Every run has a button elsewhere; a tab stop at each segment would slow down the keyboard.
  return node;
}

/** The units of each run in a part. A holder on several parts counts equally in each, scaled to the held units. */
function segmentsOf(pool, part) {
  const segmentByRun = new Map();
  for (const holder of pool.holders) {
    if (part.index >= 0 && holder.parts.length && !holder.parts.includes(part.index)) continue;
    const divided = part.index >= 0 ? Math.max(1, holder.parts.length || pool.parts.length) : 1;
    const {run} = holder;
    const one = segmentByRun.get(run) ?? {key: `run ${run}`, kind: "run", run, label: run, units: 0, by: 0};
    one.units += holder.units / divided;
    one.by += 1;
    segmentByRun.set(run, one);
  }
  const segments = [...segmentByRun.values()].sort((a, b) => (a.run < b.run ? -1 : 1));
  const known = segments.reduce((sum, one) => sum + one.units, 0);
  if (known > part.held) for (const one of segments) one.units *= part.held / known;
  else if (known < part.held) segments.push(extra("others", "others", part.held - known));
  if (pool.spent && part.index < 0) segments.push(extra("spent", "spent, comes back with time", pool.spent));
  return segments;
}

function extra(kind, label, amount) {
  return {key: kind, kind, run: "", label, units: amount, by: 0};
}

// Devices.

/** Neighbouring devices with one holder, or free with one model, are one chunk. */
function chunks(node, pool, run) {
  keyed(node, chunksOf(pool), (chunk) => `chunk ${chunk.parts[0].index} ${chunk.parts.length}`,
    () => box("div", "chunk", el("small"), el("span", "model"), button("run", "")),
    (item, chunk) => {
      const first = chunk.parts[0].index;
      const last = chunk.parts.at(-1).index;
      style(item, "flex-grow", String(chunk.parts.length));
      style(item, "flex-basis", `${chunk.parts.length * 60}px`);
      put(item.children[0], first === last ? `device ${first}` : `devices ${first}–${last}`);
      putName(item.children[1], chunk.service || "no model");
      attr(item, "data-empty", chunk.service ? null : "yes");
      paintRun(item, chunk.run);
      attr(item, "data-held", chunk.run ? "yes" : null);
      attr(item, "data-dim", run && chunk.run && chunk.run !== run ? "yes" : null);
      if (chunk.run) putRun(item.children[2], chunk.run);
      else free(item.children[2]);
    });
}

function free(node) {
  putName(node, "free");
  attr(node, "data-run", null);
  attr(node, "data-colour", null);
  node.disabled = true;
}

function chunksOf(pool) {
  const holderByPart = new Map();
  for (const holder of pool.holders) for (const part of holder.parts) holderByPart.set(part, holder);
  const chunks = [];
  for (const part of pool.parts) {
    const holder = holderByPart.get(part.index);
    const run = holder?.run ?? (part.held ? HIDDEN : "");
    // Actions of a batch share a chunk, and the view contains one of them, so devices identify a chunk.
    const key = run ? `${holder?.parts.join() ?? part.index}` : `free ${part.service}`;
    if (chunks.at(-1)?.key === key) chunks.at(-1).parts.push(part);
    else chunks.push({key, run, service: part.service, parts: [part]});
  }
  return chunks;
}
