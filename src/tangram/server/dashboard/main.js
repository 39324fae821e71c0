// Main: connects the modules. Owns the state (the latest view, the rows, the place) and when the page is
// updated: with a new view, new rows or another place, once per frame, and only the visible page.

import {Header} from "./header.js";
import {OverviewPage} from "./overview.js";
import {HIDDEN, meetRuns} from "./palette.js";
import {Place} from "./place.js";
import {Poll} from "./poll.js";
import {ActionsPage} from "./queue.js";
import {Rows} from "./rows.js";
import {RunsPage} from "./runs.js";
import {SandboxesPage} from "./sandboxes.js";
import {meetActions} from "./sentence.js";
import {StoryPanel} from "./story.js";
import {themeSwitch} from "./theme.js";
import {TimelinePage} from "./timeline.js";
import {TokenDialog} from "./token.js";
import {hideTooltip} from "./tooltip.js";

const content = document.getElementById("content");
const rows = new Rows();
const pages = {};
let view = null;
let scheduled = false;
let fresh = false;
let opener = null;

const place = new Place((elsewhere) => {
  hideTooltip();
  if (elsewhere) pages.timeline?.takePlace();
  soon();
});

const poll = new Poll({
  view(received) {
    view = received;
    fresh = true;
    meetRuns(received.runs.map((run) => run.name));
    meetActions(received);
    header.received = Date.now();
    document.body.dataset.instance = received.service.instance;
    document.body.dataset.views = Number(document.body.dataset.views ?? 0) + 1;
    soon();
  },
  rows(received, forgotten, more) {
    rows.add(received, forgotten);
    document.body.dataset.rows = rows.length;
    document.body.dataset.complete = !more;
    if (received.length) soon();
  },
  restarted() {
    rows.clear();
    pages.timeline?.restarted();
    document.body.dataset.rows = 0;
  },
  state(state) {
    document.body.dataset.phase = state.phase;
    dialog.update(state);
    header.tick();
  },
});

const MAKE = {
  overview: () => new OverviewPage(soon),
  actions: () => new ActionsPage(),
  timeline: () => new TimelinePage(place, rows, open, poll),
  runs: () => new RunsPage(),
  sandboxes: () => new SandboxesPage(),
};

const header = new Header(poll, place, themeSwitch(() => pages.timeline?.themed()));
const dialog = new TokenDialog((token) => poll.use(token));
const story = new StoryPanel(poll, rows, close);

function soon() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    update();
  });
}

function update() {
  const state = {view, rows, place};
  header.update(state);
  document.body.dataset.page = place.page;
  if (view) {
    const page = (pages[place.page] ??= MAKE[place.page]());
    if (content.firstElementChild !== page.root) {
      content.replaceChildren(page.root);
      scrollTo(0, 0);
    }
    if (place.page === "timeline") page.update(view);
    else page.update(state);
  }
  story.update(state, fresh);
  fresh = false;
  document.body.dataset.updates = Number(document.body.dataset.updates ?? 0) + 1;
}

function open(id) {
  if (!id || id === HIDDEN) return;
  if (!place.action) opener = document.activeElement;
  place.go({action: id});
  story.update({view, place}, false);
  story.focus();
}

function close() {
  place.go({action: ""});
  if (opener?.isConnected) opener.focus();
  opener = null;
}

document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-action-id], [data-run], [data-page], [data-skip]");
  if (!target || target === document.body) return;
  const {actionId, run, page, skip} = target.dataset;
  if (skip !== undefined) {
    event.preventDefault();
    content.focus();
  } else if (actionId) {
    open(actionId);
  } else if (run) {
    place.go({run: place.run === run ? "" : run});
  } else if (page) {
    place.go({page});
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && place.action && !document.querySelector("dialog[open]")) close();
});

soon();
poll.now();
