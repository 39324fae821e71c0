// Runs: the tenants of the service. Owns the share of each run, the time breakdown of its trajectories, and the classes.

import {attr, box, button, el, keyed, panel, put, show, style} from "./dom.js";
import {count, duration, number, percent, words} from "./format.js";
import {classesOf} from "./past.js";
import {paintRun, putRun} from "./palette.js";
import {Table} from "./table.js";

const WAITING_TONES = 4;

/** The parts of a time breakdown in display order. */
function partsOf(breakdown) {
  const waiting = Object.entries(breakdown.waiting_s).sort((a, b) => b[1] - a[1]);
  const parts = waiting.map(([kind, seconds], k) => ({
    key: `waiting ${kind}`, label: `waiting for ${kind}`, seconds,
    colour: `waiting-${Math.min(k, WAITING_TONES - 1)}`,
  }));
  for (const key of ["overhead", "execution", "thinking"]) {
    parts.push({key, label: key, seconds: breakdown[`${key}_s`], colour: `part-${key}`});
  }
  return parts.filter((part) => part.seconds > 0);
}

/** One line per run: its share, and a bar with its time breakdown. */
export class RunBars {
  constructor() {
    const {root, body, note} = panel("Runs", "runs");
    put(note, "share: of the pool that it holds most of; time: of its trajectories, since they began");
    this.root = root;
    this.list = el("div", "run-list");
    this.empty = el("p", "empty",
      "Each run is listed here with its share and its time breakdown, once it has submitted an action.");
    body.append(this.list, this.empty);
  }

  update({view, place}) {
    show(this.empty, view.runs.length === 0);
    keyed(this.list, view.runs, (run) => run.name, makeRun, (node, run) => fillRun(node, run, place.run));
  }
}

function makeRun() {
  const share = box("div", "share", el("div", "share-bar"), el("span", "amount"));
  share.firstChild.append(el("div", "share-part"));
  return box("div", "run-line",
    box("div", "run-head", button("run", ""), el("small")),
    share,
    box("div", "run-time", el("div", "time-bar"), el("div", "time-parts")));
}

function fillRun(node, run, chosen) {
  attr(node, "data-name", run.name);
  attr(node, "data-dim", chosen && chosen !== run.name ? "yes" : null);
  paintRun(node, run.name);
  const [head, share, time] = node.children;
  putRun(head.firstChild, run.name);
  attr(head.firstChild, "aria-pressed", chosen === run.name);
  put(head.lastChild, `weight ${number(run.weight)} · ${count(run.running)} running · ${count(run.waiting)} waiting`);
  style(share.firstChild.firstChild, "width", `${Math.min(100, run.share * 100)}%`);
  put(share.lastChild, percent(run.share));
  fillTime(time, run.time_breakdown);
}

function fillTime(node, breakdown) {
  const parts = partsOf(breakdown);
  const [bar, words] = node.children;
  const total = parts.reduce((sum, part) => sum + part.seconds, 0);
  attr(bar, "role", "img");
  const description = parts.map((part) => `${part.label} ${percent(part.seconds / total)}`).join(", ");
  attr(bar, "aria-label", description || "no time yet");
  keyed(bar, parts, (part) => part.key, () => el("div"), (piece, part) => {
    attr(piece, "class", `time-piece ${part.colour}`);
    style(piece, "flex-grow", String(part.seconds / total));
    attr(piece, "title", `${part.label}: ${duration(part.seconds)}, ${percent(part.seconds / total)}`);
  });
  keyed(words, parts, (part) => part.key,
    () => box("span", "", el("i", "swatch"), el("span"), el("b")),
    (piece, part) => {
      attr(piece.children[0], "class", `swatch ${part.colour}`);
      put(piece.children[1], part.label);
      put(piece.children[2], percent(part.seconds / total));
    });
}

const act = (key) => (item) => (item.act.count ? duration(item.act[key]) : "–");

/** Counts of each run, and the classes that took most time. */
export class RunsPage {
  constructor() {
    this.bars = new RunBars();
    this.table = new Table("Runs in numbers", [
      {title: "Run", width: 12, kind: "run", value: (run) => run.name},
      {title: "Weight", width: 6, right: true, value: (run) => number(run.weight)},
      {title: "Share", width: 6, right: true, value: (run) => percent(run.share)},
      {title: "Running", width: 6.5, right: true, value: (run) => count(run.running)},
      {title: "Waiting", width: 6.5, right: true, value: (run) => count(run.waiting)},
      {title: "Sandboxes", width: 8, right: true, value: (run) => count(run.sandboxes)},
      {title: "Succeeded", width: 8, right: true, value: (run) => count(run.settled.succeeded ?? 0)},
      {title: "Other ends", width: 16, right: true, wide: true, kind: "name", value: otherEnds},
      {title: "ACT mean", right: true, value: act("mean_s"), hint: "action completion time, within the hour"},
      {title: "p50", right: true, value: act("p50_s")},
      {title: "p95", right: true, value: act("p95_s")},
      {title: "p99", right: true, value: act("p99_s")},
    ], (run) => run.name, "No run has submitted an action yet. Runs are listed here with their actions and times.");
    this.classes = new Table("Classes", [
      {title: "Class", width: 36, kind: "name", wide: true, value: (kind) => kind.name},
      {title: "Actions", right: true, value: (kind) => count(kind.act.count)},
      {title: "ACT mean", right: true, value: act("mean_s"), hint: "action completion time"},
      {title: "p50", right: true, value: act("p50_s")},
      {title: "p95", right: true, value: act("p95_s")},
      {title: "p99", right: true, value: act("p99_s")},
      {title: "Waiting", right: true, value: (kind) => duration(kind.waiting_s), hint: "mean"},
      {title: "Execution", right: true, value: (kind) => duration(kind.execution_s), hint: "mean"},
      {title: "Overhead", right: true, value: (kind) => duration(kind.overhead_s), hint: "mean"},
    ], (kind) => kind.name,
    "Actions that behave alike are a class. Each class is listed here once its first action has ended.");
    const numbers = panel("Runs in numbers");
    put(numbers.note, "completion times of what settled within the hour");
    numbers.body.append(this.table.root);
    const classes = panel("Classes");
    this.note = classes.note;
    classes.body.append(this.classes.root);
    this.root = box("div", "page", this.bars.root, numbers.root, classes.root);
  }

  update(state) {
    const {view, rows, place} = state;
    this.bars.update(state);
    this.table.update(place.run ? view.runs.filter((run) => run.name === place.run) : view.runs, view.now_s);
    this.classes.update(place.run ? classesOf(rows, place.run) : view.classes, view.now_s);
    put(this.note, place.run
      ? "of this run, among the remembered actions" : "those that took most time within the hour");
  }
}

function otherEnds(run) {
  const others = Object.entries(run.settled)
    .filter(([status, n]) => status !== "succeeded" && n > 0).sort((a, b) => b[1] - a[1]);
  return others.map(([status, n]) => `${count(n)} ${words(status)}`.replaceAll(" ", "\u00a0")).join(", ") || "none";
}
