// Timeline: the page with every remembered action on a canvas. Owns its range and the marked action; draws at most
// once per frame. lanes.js owns the layout, timeline_paint.js the drawing, timeline_find.js the search.

import {attr, box, button, el, keyed, put, show, style} from "./dom.js";
import {count, counted, duration, timeOfDay, words} from "./format.js";
import {HEAD, layout} from "./lanes.js";
import {Minimap} from "./minimap.js";
import {putRun} from "./palette.js";
import {Range, RECENT_S} from "./range.js";
import {Finder} from "./timeline_find.js";
import {listen} from "./timeline_input.js";
import {AXIS, mark, paint} from "./timeline_paint.js";
import {actionAt, showActionTooltip} from "./timeline_point.js";
import {hideTooltip} from "./tooltip.js";

const GUTTER = 150;
/* Beside lanes of trajectories, for their names. */
const EXPORT = "Download all actions that are remembered as a Chrome trace, for ui.perfetto.dev";
const REVOKE_MS = 60_000;
/* The browser has read the file by then. */

export class TimelinePage {
  constructor(place, rows, open, poll) {
    this.place = place;
    this.rows = rows;
    this.open = open;
    this.poll = poll;
    this.range = new Range();
    this.live = [];
    this.scroll = 0;
    this.hovered = "";
    this.view = null;
    this.frames = 0;
    this.scheduled = false;
    this.build();
    this.takePlace();
  }

  build() {
    this.root = el("section", "panel timeline");
    this.root.setAttribute("aria-label", "Timeline of actions");
    this.canvas = el("canvas", "plot");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label", "Timeline of actions. Arrows move, plus and minus zoom, 0 shows everything, "
      + "L the last minutes, N and P go to the next and previous action, Enter opens its story.");
    this.labels = el("div", "lane-labels");
    this.empty = el("p", "empty over");
    this.area = box("div", "plot-area", this.canvas, this.labels, this.empty);
    this.minimap = new Minimap((from, to) => this.change(() => this.range.place(from, to)), () => this.everything());
    this.root.append(this.toolbar(), this.area, this.minimap.canvas);
    new ResizeObserver(() => this.resize()).observe(this.area);
    listen(this);
  }

  toolbar() {
    this.finder = new Finder(this);
    this.summary = el("span", "note grow");
    const lanes = box("div", "segmented", this.laneButton("packed", "Packed"),
      this.laneButton("trajectories", "Trajectories"));
    lanes.setAttribute("role", "group");
    lanes.setAttribute("aria-label", "Lanes");
    const out = button("", "−", "Zoom out");
    const into = button("", "+", "Zoom in");
    out.addEventListener("click", () => this.zoom(1.6));
    into.addEventListener("click", () => this.zoom(1 / 1.6));
    this.recentButton = button("", `Last ${RECENT_S / 60} min`);
    this.allButton = button("", "Everything");
    this.recentButton.addEventListener("click", () => this.recent());
    this.allButton.addEventListener("click", () => this.everything());
    this.exportButton = button("", "Export");
    attr(this.exportButton, "title", EXPORT);
    this.exportButton.addEventListener("click", () => this.export());
    const zooms = box("div", "segmented", out, into, this.recentButton, this.allButton);
    return box("div", "timeline-head",
      box("div", "toolbar", this.finder.input, this.finder.matchCount, this.summary, lanes, zooms,
        box("div", "segmented", this.exportButton)), this.legend());
  }

  /** Downloads the timeline as the service remembers it. */
  async export() {
    try {
      const address = URL.createObjectURL(await this.poll.traceEvents());
      const link = el("a");
      link.href = address;
      link.download = "timeline.json";
      link.click();
      setTimeout(() => URL.revokeObjectURL(address), REVOKE_MS);
      put(this.exportButton, "Export");
      attr(this.exportButton, "title", EXPORT);
    } catch (error) {
      put(this.exportButton, "Export failed");
      attr(this.exportButton, "title", `${error.message}. Click to try again.`);
    }
  }

  laneButton(kind, text) {
    const node = button("", text);
    node.dataset.lanes = kind;
    node.addEventListener("click", () => {
      this.place.keep({lanes: kind});
      this.scroll = 0;
      this.schedule();
    });
    return node;
  }

  legend() {
    const node = el("div", "legend");
    for (const [kind, text] of [["light", "waiting"], ["deep", "overhead"], ["full", "execution"]]) {
      node.append(box("span", "", el("i", `swatch tone-${kind}`), el("span", "", text)));
    }
    this.marks = ["timed_out", "cancelled", "refused", "lost"].map((status) => {
      const sign = el("canvas", "sign");
      node.append(box("span", "", sign, el("span", "", words(status))));
      return [status, sign];
    });
    node.append(el("span", "push",
      "Wheel zooms, drag moves, shift and wheel scroll; keys: arrows, + and −, N and P, Enter"));
    return node;
  }

  paintMarks() {
    const ratio = devicePixelRatio;
    for (const [status, sign] of this.marks) {
      sign.width = sign.height = 12 * ratio;
      const context = sign.getContext("2d");
      context.scale(ratio, ratio);
      mark(context, status, 6, 6, 4.5);
    }
  }

  /** After a reload or a step back: the range in the address. */
  takePlace() {
    this.finder.takePlace();
    const {range} = this.place;
    if (range === "all") this.range.all();
    else if (!range) this.range.recent();
    else if (this.view) this.range.set(range.from - this.offset, range.to - this.offset);
    this.scroll = 0;
  }

  get offset() {
    return this.view ? this.view.at - this.view.now_s : 0;
  }

  update(view) {
    const first = this.view === null;
    this.view = view;
    this.live = liveOf(view);
    this.range.settle(this.rows.length ? this.rows.start() : Math.max(0, view.now_s - RECENT_S), view.now_s);
    if (first) this.takePlace();
    this.schedule();
  }

  themed() {
    this.paintMarks();
    this.schedule();
  }

  /** The service was restarted: the shown actions are gone. */
  restarted() {
    this.range = new Range();
    this.place.keep({range: null});
  }

  resize() {
    const {clientWidth: width, clientHeight: height} = this.area;
    if (!width || !height) return;
    const ratio = devicePixelRatio;
    this.width = width;
    this.height = height;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.context = this.canvas.getContext("2d");
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.minimap.resize(width, ratio);
    this.paintMarks();
    this.draw();
  }

  /** Draws with the next frame. */
  schedule() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.draw();
    });
  }

  draw() {
    if (!this.context || !this.view || !this.root.isConnected) return;
    const {range, rows, place} = this;
    this.finder.match();
    const left = place.lanes === "trajectories" ? GUTTER : 0;
    this.plan = layout(rows, this.live, {
      from: range.from, to: range.to, run: place.run, mode: place.lanes, height: this.height - AXIS,
    });
    this.scroll = Math.max(0, Math.min(this.scroll, this.plan.height - (this.height - AXIS)));
    this.frame = {
      width: this.width, height: this.height, ratio: devicePixelRatio, left, scroll: this.scroll, range,
      offset: this.offset, font: "system-ui, sans-serif",
    };
    const merged = paint(this.context, rows, this.plan, this.frame,
      {matches: this.finder.matches, selected: place.action || this.hovered});
    this.minimap.draw(rows, range, place.run);
    this.describe(merged);
  }

  describe(merged) {
    const {range, plan, offset} = this;
    const total = plan.count + plan.live.length;
    const digits = range.to - range.from < 10 ? 3 : 0;
    const [from, to] = [range.from, range.to].map((s) => timeOfDay(s + offset, digits));
    const forgotten = this.rows.forgotten + this.rows.dropped;
    put(this.summary, `${counted(total, "action")} from ${from} to ${to} (${duration(range.to - range.from)})`
      + (forgotten && range.mode === "all" ? `; ${count(forgotten)} earlier ones are not remembered` : ""));
    attr(this.recentButton, "aria-pressed", range.mode === "recent" && range.span === RECENT_S);
    attr(this.allButton, "aria-pressed", range.mode === "all");
    for (const node of this.root.querySelectorAll("[data-lanes]")) {
      attr(node, "aria-pressed", node.dataset.lanes === this.place.lanes);
    }
    show(this.empty, total === 0);
    if (total === 0) {
      put(this.empty, this.rows.length
        ? "No action in this stretch of time. “Everything” shows all that are remembered."
        : "Every action is shown here with its waiting, overhead and execution, once the first one is submitted.");
    }
    this.label();
    Object.assign(this.canvas.dataset, {
      from: range.from.toFixed(4), to: range.to.toFixed(4), mode: range.mode, rows: this.rows.length,
      picked: plan.count, live: plan.live.length, merged, laneTotal: plan.laneTotal, frame: ++this.frames,
    });
  }

  label() {
    const {laneHeight} = this.plan;
    // Where the last lane of a group displaces its name.
    const below = (its) => its.top + its.lanes * laneHeight - this.scroll;
    const visible = this.plan.groups.filter((its) => below(its) > -HEAD && its.top - this.scroll < this.height - AXIS);
    keyed(this.labels, visible, (its) => its.run,
      () => box("div", "lane-label", button("run", ""), el("span", "note")),
      (node, its) => {
        putRun(node.firstChild, its.run);
        put(node.lastChild, counted(its.count, "action"));
        // It stays visible as long as any of its lanes.
        const top = AXIS + Math.min(Math.max(its.top - this.scroll, 0), below(its));
        style(node, "transform", `translateY(${Math.round(top)}px)`);
      });
  }

  // Panning and zooming.

  change(how) {
    how();
    const {range, offset} = this;
    const kept = {recent: null, all: "all"}[range.mode];
    this.place.keep({range: kept === undefined ? {from: range.from + offset, to: range.to + offset} : kept});
    this.schedule();
  }

  zoom(factor, at = (this.range.from + this.range.to) / 2) {
    this.change(() => this.range.zoom(factor, at));
  }

  pan(part) {
    this.change(() => this.range.pan((this.range.to - this.range.from) * part));
  }

  scrollBy(pixels) {
    this.scroll += pixels;
    this.schedule();
  }

  everything() {
    this.change(() => this.range.all());
  }

  recent() {
    this.change(() => this.range.recent());
  }

  second(x) {
    const {left, width} = this.frame;
    return this.range.from + ((x - left) / (width - left)) * (this.range.to - this.range.from);
  }

  // Hovering.

  hover(x, y, event) {
    const action = actionAt(this, x, y);
    const id = action?.id ?? "";
    this.canvas.classList.toggle("pointing", action !== null);
    if (!action) hideTooltip();
    else showActionTooltip(event.clientX, event.clientY, action);
    this.point(id);
  }

  /** Marks an action; with "" none. */
  point(id) {
    if (id === this.hovered) return;
    this.hovered = id;
    attr(this.canvas, "data-hovered", id || null);
    this.schedule();
  }

  /** The pointer left. */
  left() {
    hideTooltip();
    this.point("");
  }

  openHovered() {
    if (this.hovered) this.open(this.hovered);
  }
}

/** Actions in progress, from the view; they extend to the present. */
function liveOf(view) {
  const until = view.now_s;
  const {waiting, running} = view;
  return [
    ...running.map((a) => ({...a, submitted: a.submitted_s, granted: a.started_s, until})),
    ...waiting.map((a) => ({...a, state: "waiting", submitted: a.since_s, granted: null, until})),
  ];
}
