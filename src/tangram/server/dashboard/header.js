// Header: the pages, the run filter, whether the data is live, and facts of the service.
// Owns the top of the page and the banner that explains missing updates.

import {attr, box, button, cut, el, keyed, put, putName, show, style} from "./dom.js";
import {count, duration, moment, timeOfDay} from "./format.js";
import {PAGES} from "./place.js";
import {HIDDEN} from "./palette.js";

const STALE_S = 3;
/* A view is fetched every second; an older one is not live any more. */

export class Header {
  constructor(poll, place, theme) {
    this.poll = poll;
    this.place = place;
    this.received = 0;
    this.broken = false;
    this.nav = document.getElementById("pages");
    this.tabs = PAGES.map((page) => {
      const node = box("button", "", el("span", "", page[0].toUpperCase() + page.slice(1)), el("em"));
      node.type = "button";
      node.dataset.page = page;
      this.nav.append(node);
      return node;
    });
    this.live = box("span", "live", el("i"), el("span"));
    this.live.setAttribute("role", "img");
    this.forget = button("link quiet", "Forget token");
    this.forget.addEventListener("click", () => this.poll.use(""));
    document.getElementById("controls").append(this.filter(), this.forget, this.live, theme);
    this.buildBanner();
    this.facts = document.getElementById("facts");
    setInterval(() => document.hidden || this.tick(), 500);
    const top = document.querySelector(".top");
    new ResizeObserver(() => style(document.documentElement, "--top", `${top.offsetHeight}px`)).observe(top);
  }

  filter() {
    this.select = el("select", "filter");
    this.select.setAttribute("aria-label", "Filter everything by a run");
    this.select.addEventListener("change", () => this.place.go({run: this.select.value}));
    show(this.select, false); // Until there are runs.
    return this.select;
  }

  buildBanner() {
    this.banner = document.getElementById("banner");
    this.sentence = el("span");
    this.countdown = el("span");
    this.countdown.setAttribute("aria-hidden", "true");
    this.again = button("", "Try now");
    this.again.addEventListener("click", () => this.poll.now());
    this.banner.append(this.sentence, this.countdown, this.again);
  }

  update({view, place}) {
    for (const tab of this.tabs) attr(tab, "aria-current", tab.dataset.page === place.page ? "page" : null);
    if (!view) return;
    const actions = view.running_total + view.waiting_total;
    const numbers = {actions, runs: view.runs.length, sandboxes: view.sandboxes_total};
    for (const tab of this.tabs) {
      const n = numbers[tab.dataset.page];
      put(tab.lastChild, n === undefined ? "" : count(n));
    }
    this.choices(view, place);
    this.fillFacts(view);
    document.title = view.waiting_total ? `Tangram: ${count(view.waiting_total)} waiting` : "Tangram";
  }

  choices(view, place) {
    const names = view.runs.map((run) => run.name).filter((name) => name !== HIDDEN);
    if (place.run && !names.includes(place.run)) names.push(place.run);
    keyed(this.select, ["", ...names], (name) => name, () => el("option"), (node, name) => {
      put(node, name ? cut(name, 40) : "All runs");
      if (node.value !== name) node.value = name;
    });
    if (this.select.value !== place.run) this.select.value = place.run;
    show(this.select, true);
    attr(this.select, "data-set", place.run ? "yes" : null);
  }

  fillFacts(view) {
    const {service} = view;
    this.view = view;
    const state = this.broken ? "not known" : service.state;
    const facts = [
      ["Service", state], ["Up for", duration(Math.max(0, Math.round(view.at - service.began_at)))],
      ["Version", service.version], ["Policy", service.policy], ["Durability", service.durability],
    ];
    if (service.draining?.length) facts.push(["Draining", service.draining.join(", ")]);
    if (service.recovered) facts.push(["Recovered", service.recovered]);
    keyed(this.facts, facts, ([key]) => key, () => box("span", "fact", el("span"), el("b")), (node, [key, value]) => {
      put(node.firstChild, key);
      putName(node.lastChild, value);
      attr(node, "data-fact", key.toLowerCase().replace(" ", "-"));
    });
    attr(this.facts, "data-state", state);
    attr(this.facts.firstElementChild, "title", `since ${moment(service.began_at)}`);
  }

  tick() {
    const {phase, since, retryAt, message} = this.poll.state;
    const age = this.received ? (Date.now() - this.received) / 1000 : NaN;
    const stale = phase === "live" && age > STALE_S;
    const words = {
      connecting: "Connecting", live: stale ? `Slow: ${duration(Math.round(age))} old` : "Live", paused: "Paused",
      gone: "Disconnected", refused: "Refused", token: "Needs a token",
    }[phase];
    const old = phase === "live" ? (stale ? "" : ", updated now") : age > 1 ? `, ${duration(Math.round(age))} old` : "";
    put(this.live.lastChild, words + old);
    attr(this.live, "data-phase", stale ? "stale" : phase);
    const shown = Number.isFinite(age) ? `what is shown is ${duration(Math.round(age))} old` : "nothing is shown yet";
    attr(this.live, "aria-label", `${words}; ${shown}`);
    show(this.forget, this.poll.token !== "");
    const broken = phase === "gone" || phase === "refused";
    show(this.banner, broken);
    if (broken !== this.broken) {
      this.broken = broken;
      if (this.view) this.fillFacts(this.view);
    }
    if (!broken) return;
    const from = this.received ? ` What is shown is from ${timeOfDay(this.received / 1000)}.` : "";
    const what = phase === "gone" ? `No answer from the service since ${timeOfDay(since / 1000)}`
      : `The service refused: ${cut(message, 300)}`;
    put(this.sentence, `${what}.${from}`);
    const rest = Math.ceil((retryAt - Date.now()) / 1000);
    put(this.countdown, rest > 0 ? `Trying again in ${rest} s.` : "Trying…");
  }
}
