// Place: where the reader is. Owns location.hash: the page, the run that everything is filtered by, the open story,
// and of the timeline its stretch of time, its lanes and what is searched for. A reload or a sent link comes back here.
// Moments are kept in seconds since 1970, so that a link stays true when the service was started again.

export const PAGES = ["overview", "actions", "timeline", "runs", "sandboxes"];

const LATER_MS = 250;
/* Browsers refuse more than about 200 changes of the address within 30 s, which dragging would reach. */

export class Place {
  constructor(changed) {
    this.changed = changed;
    this.timer = 0;
    this.read();
    addEventListener("hashchange", () => {
      this.read();
      this.changed(true);
    });
  }

  read() {
    const [page, query = ""] = location.hash.slice(1).split("?", 2);
    const found = new URLSearchParams(query);
    this.page = PAGES.includes(page) ? page : "overview";
    this.run = found.get("run") ?? "";
    this.action = found.get("action") ?? "";
    this.find = found.get("find") ?? "";
    this.lanes = found.get("lanes") === "trajectories" ? "trajectories" : "packed";
    this.range = rangeOf(found);
  }

  hash() {
    const kept = new URLSearchParams();
    if (this.run) kept.set("run", this.run);
    if (this.action) kept.set("action", this.action);
    if (this.find) kept.set("find", this.find);
    if (this.lanes !== "packed") kept.set("lanes", this.lanes);
    if (this.range === "all") kept.set("range", "all");
    else if (this.range) {
      kept.set("from", this.range.from.toFixed(3));
      kept.set("to", this.range.to.toFixed(3));
    }
    const query = kept.toString();
    return `#${this.page}${query ? `?${query}` : ""}`;
  }

  /** Goes somewhere: Back comes back from it. */
  go(changes) {
    clearTimeout(this.timer);
    Object.assign(this, changes);
    if (this.hash() !== location.hash) history.pushState(null, "", this.hash());
    this.changed(false);
  }

  /** Keeps what is not a step of its own, such as the stretch of time while it is dragged. */
  keep(changes) {
    Object.assign(this, changes);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => history.replaceState(null, "", this.hash()), LATER_MS);
  }
}

/** "all", a stretch of time, or null: the last minutes. */
function rangeOf(found) {
  if (found.get("range") === "all") return "all";
  const from = Number(found.get("from") ?? NaN);
  const to = Number(found.get("to") ?? NaN);
  return Number.isFinite(from) && Number.isFinite(to) && to > from ? {from, to} : null;
}
