// Queue: actions that wait, each with its reason, and actions that run. Owns both tables and their page.

import {box, button, panel, put} from "./dom.js";
import {count, duration, units} from "./format.js";
import {Table} from "./table.js";

const FIRST = 6;
/* On the overview: the front of the queue. */

const WHO = [
  {title: "Action", width: 19, kind: "action", value: (action) => [action.id, action.run]},
  {title: "Run", width: 13, kind: "run", value: (action) => action.run},
  {title: "Class", width: 16, kind: "name", value: (action) => action.name},
];

function waitingTable() {
  return new Table("Waiting actions", [
    ...WHO,
    {title: "Waits for", width: 8, right: true, value: (action, now) => duration(Math.max(0, now - action.since_s))},
    {title: "Why", kind: "sentence", wide: true, value: why},
  ], (action) => action.id,
  "No action waits. Waiting actions are listed here, each with its reason.");
}

function runningTable(unitByPool) {
  return new Table("Running actions", [
    ...WHO,
    {title: "Trajectory", width: 12, kind: "name", value: (action) => action.trajectory},
    {title: "State", width: 7, value: (action) => action.state},
    {title: "Waited", width: 7, right: true, value: (action) => duration(action.started_s - action.submitted_s)},
    {title: "For", width: 7, right: true, value: (action, now) => duration(Math.max(0, now - action.started_s))},
    {title: "Node", width: 7, kind: "name", value: (action) => action.node || "–"},
    {title: "Holds", kind: "name", wide: true, value: (action) => holds(action, unitByPool())},
  ], (action) => action.id, "No action runs. Actions that hold units are listed here, with their units.");
}

/** The reason without its leading id, which is in the same row. */
function why(action) {
  return action.reason.startsWith(`${action.id} `) ? action.reason.slice(action.id.length + 1) : action.reason;
}

function holds(action, unitByPool) {
  const held = Object.entries(action.units);
  return held.map(([pool, n]) => `${units(n, unitByPool.get(pool) ?? "units")} of ${pool}`).join(", ");
}

const ofRun = (items, run) => (run ? items.filter((item) => item.run === run) : items);

/** "200 of 1,204", unless all are shown. */
function shownOf(shown, total, run) {
  if (run) return `${count(shown)} of this run`;
  return shown < total ? `the first ${count(shown)} of ${count(total)}` : count(total);
}

/** The front of the queue, for the overview. */
export class QueueFront {
  constructor() {
    const {root, head, body, note} = panel("Waiting");
    this.root = root;
    this.note = note;
    this.table = waitingTable();
    this.more = button("link push", "All waiting and running");
    this.more.dataset.page = "actions";
    head.append(this.more);
    body.append(this.table.root);
  }

  update({view, place}) {
    const waiting = ofRun(view.waiting, place.run);
    const total = place.run ? waiting.length : view.waiting_total;
    put(this.note, total > FIRST ? `the first ${FIRST} of ${count(total)}` : "");
    this.table.update(waiting.slice(0, FIRST), view.now_s);
  }
}

export class ActionsPage {
  constructor() {
    this.units = new Map();
    this.waiting = waitingTable();
    this.running = runningTable(() => this.units);
    const queue = panel("Waiting");
    const running = panel("Running");
    queue.body.append(this.waiting.root);
    running.body.append(this.running.root);
    this.notes = [queue.note, running.note];
    this.root = box("div", "page", queue.root, running.root);
  }

  update({view, place}) {
    this.units = new Map(view.pools.map((pool) => [pool.name, pool.unit]));
    const waiting = ofRun(view.waiting, place.run);
    const running = ofRun(view.running, place.run);
    put(this.notes[0], shownOf(waiting.length, view.waiting_total, place.run));
    put(this.notes[1], shownOf(running.length, view.running_total, place.run));
    this.waiting.update(waiting, view.now_s);
    this.running.update(running, view.now_s);
  }
}
