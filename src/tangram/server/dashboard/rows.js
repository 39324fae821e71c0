// Rows: the settled actions that the timeline shows, at most ROWS_MAX. Owns them in typed arrays in the order of their
// ends, and finds by binary search those that overlap a range of time.

export const ROWS_MAX = 20_000;

const [SEQ, ID, RUN, TRAJECTORY, NAME, STATUS, SUBMITTED, GRANTED, ENDED, WAITING, EXECUTION, OVERHEAD, CPU, NODE] =
  Array(14).keys();
/* The indices of the fields of Row in runtime/views.py. */

export const STATUSES = ["succeeded", "timed_out", "cancelled", "refused", "lost"];

export class Rows {
  constructor() {
    this.submitted = new Float64Array(ROWS_MAX);
    this.ended = new Float64Array(ROWS_MAX);
    this.earliest = new Float64Array(ROWS_MAX); // of this row and all after it: the first submission
    this.waiting = new Float64Array(ROWS_MAX);
    this.overhead = new Float64Array(ROWS_MAX);
    this.run = new Int32Array(ROWS_MAX);
    this.trajectory = new Int32Array(ROWS_MAX);
    this.status = new Uint8Array(ROWS_MAX);
    this.lane = new Int32Array(ROWS_MAX);
    this.clear();
  }

  clear() {
    this.list = [];
    this.runs = new Names();
    this.trajectories = new Names();
    this.trajectoryParts = []; // by number: run and trajectory
    this.lanesByRun = [];
    this.forgotten = 0;
    this.version = (this.version ?? 0) + 1; // rises with every change
    this.dropped = 0;
  }

  get length() {
    return this.list.length;
  }

  add(added, forgotten) {
    this.forgotten += forgotten;
    if (!added.length) return;
    const sorted = added.every((row, k) => k === 0 || added[k - 1][ENDED] <= row[ENDED]);
    const after = this.length === 0 || this.ended[this.length - 1] <= added[0][ENDED];
    if (sorted && after) {
      this.append(added);
    } else {
      const all = this.list.concat(added).sort((a, b) => a[ENDED] - b[ENDED] || a[SEQ] - b[SEQ]);
      this.list = [];
      this.lanesByRun = [];
      this.append(all);
    }
    this.version += 1;
  }

  append(added) {
    const rows = added.length > ROWS_MAX ? added.slice(added.length - ROWS_MAX) : added;
    this.drop(this.length + rows.length - ROWS_MAX);
    let at = this.length;
    for (const row of rows) this.set(at++, row);
    this.list = this.list.concat(rows);
    this.lookBack(at);
  }

  set(at, row) {
    this.submitted[at] = row[SUBMITTED];
    this.ended[at] = row[ENDED];
    this.waiting[at] = row[WAITING];
    this.overhead[at] = row[OVERHEAD];
    this.status[at] = Math.max(0, STATUSES.indexOf(row[STATUS]));
    const run = (this.run[at] = this.runs.number(row[RUN]));
    this.trajectory[at] = this.trajectoryNumber(row[RUN], row[TRAJECTORY]);
    this.lane[at] = this.laneFor(run, row[SUBMITTED], row[ENDED]);
  }

  trajectoryNumber(run, trajectory) {
    const number = this.trajectories.number(`${run}\u0000${trajectory}`);
    this.trajectoryParts[number] ??= [run, trajectory];
    return number;
  }

  /** The first lane of its run that is free by then. A row keeps its lane, so that it does not jump. */
  laneFor(run, submitted, ended) {
    const ends = (this.lanesByRun[run] ??= []);
    let lane = 0;
    while (lane < ends.length && ends[lane] > submitted) lane += 1;
    ends[lane] = ended;
    return lane;
  }

  drop(count) {
    if (count <= 0) return;
    for (const array of [this.submitted, this.ended, this.earliest, this.waiting, this.overhead, this.run,
      this.trajectory, this.status, this.lane]) array.copyWithin(0, count, this.length);
    this.list = this.list.slice(count);
    this.dropped += count;
  }

  lookBack(end) {
    let least = Infinity;
    for (let k = end - 1; k >= 0; k -= 1) {
      least = Math.min(least, this.submitted[k]);
      this.earliest[k] = least;
    }
  }

  /** [first, end): outside of it no row overlaps the range; inside, `touches` decides. */
  between(from, to) {
    return [bound(this.ended, this.length, from), bound(this.earliest, this.length, to)];
  }

  touches(at, from, to) {
    return this.ended[at] >= from && this.submitted[at] <= to;
  }

  start() {
    return this.length ? this.earliest[0] : 0;
  }

  id(at) {
    return this.list[at][ID];
  }

  /** The row as a record. */
  record(at) {
    const row = this.list[at];
    return {
      id: row[ID], run: row[RUN], trajectory: row[TRAJECTORY], name: row[NAME], status: row[STATUS],
      submitted_s: row[SUBMITTED], granted_s: row[GRANTED], ended_s: row[ENDED], waiting_s: row[WAITING],
      execution_s: row[EXECUTION], overhead_s: row[OVERHEAD], cpu: row[CPU], node: row[NODE],
    };
  }

  /** The index of the action, or -1. The latest first: ids may be reused. */
  find(id) {
    for (let k = this.length - 1; k >= 0; k -= 1) if (this.list[k][ID] === id) return k;
    return -1;
  }
}

/** The first place in a rising array whose value is not below. */
function bound(array, length, value) {
  let low = 0;
  let high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Numbers for names, in order of first use. */
class Names {
  constructor() {
    this.list = [];
    this.numbers = new Map();
  }

  number(name) {
    let number = this.numbers.get(name);
    if (number === undefined) {
      number = this.list.length;
      this.numbers.set(name, number);
      this.list.push(name);
    }
    return number;
  }
}
