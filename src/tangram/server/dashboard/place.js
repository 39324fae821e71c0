// Place: the navigation state. Owns location.hash: the page, the run filter, the open story,
// and of the timeline its range, its lanes and its search. A reload or a link restores it.
// Moments are kept in seconds since 1970, so that a link stays valid after a restart of the service.

export const PAGES = ["overview", "actions", "timeline", "runs", "sandboxes"];

const LATER_MS = 250;
/* Browsers refuse more than about 200 changes of the address within 30 s, which dragging would exceed. */

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
    const parameters = new URLSearchParams(query);
    this.page = PAGES.includes(page) ? page : "overview";
    this.run = parameters.get("run") ?? "";
    this.action = parameters.get("action") ?? "";
    this.find = parameters.get("find") ?? "";
    this.lanes = parameters.get("lanes") === "trajectories" ? "trajectories" : "packed";
    this.range = rangeOf(parameters);
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

  /** Navigates with a history entry. */
  go(changes) {
    clearTimeout(this.timer);
    Object.assign(this, changes);
    if (this.hash() !== location.hash) history.pushState(null, "", this.hash());
    this.changed(false);
  }

  /** Updates without a history entry, as during a drag. */
  keep(changes) {
    Object.assign(this, changes);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => history.replaceState(null, "", this.hash()), LATER_MS);
  }
}

/** "all", a range of time, or null: the last minutes. */
function rangeOf(parameters) {
  if (parameters.get("range") === "all") return "all";
  const from = Number(parameters.get("from") ?? NaN);
  const to = Number(parameters.get("to") ?? NaN);
  return Number.isFinite(from) && Number.isFinite(to) && to > from ? {from, to} : null;
}
