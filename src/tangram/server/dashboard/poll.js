// Poll: fetches the state of the service. Owns every request, the token and the interval. Polls once a second while the
// page is visible, backs off exponentially while the service does not respond, and recovers by itself. Read-only.

const EVERY_MS = 1000;
const BACKOFF_MAX_MS = 10_000;
/* The longest time until the page notices a restarted service. */
const PATIENCE_MS = 10_000;
const ROWS_PER_REQUEST = 5000;
const FEW_ROWS = 500;
/* With fewer rows in a response the rest can wait for the next poll. */
const ROUNDS_MAX = 50;
/* A service that settles faster than rows are fetched must not delay the next view. */
const TOKEN = "tangram.token";
const UNKNOWN_TOKEN = "this service does not know it. It was revoked, or is that of another service.";

export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The service did not respond, or the response was truncated. */
class Gone extends Error {}

async function reach(path, headers, read) {
  try {
    const answer = await fetch(path, {headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS)});
    return [answer, answer.ok ? await read(answer) : null];
  } catch (error) {
    throw new Gone(String(error));
  }
}

async function request(path, token, read = (answer) => answer.json()) {
  const headers = {Accept: "application/json"};
  if (token) headers.Authorization = `Bearer ${token}`;
  const [answer, content] = await reach(path, headers, read);
  if (answer.ok) return content;
  let code = "unknown";
  let message = `the service answered ${answer.status}`;
  try {
    const {error} = await answer.json();
    code = String(error.code);
    message = String(error.message);
  } catch {
    // Not from the service itself; a proxy may respond in its place. The status is enough.
  }
  throw new Refused(answer.status, code, message);
}

/**
 * `listener` has the methods view(view), rows(rows, forgotten), restarted(), state(state).
 * A state is {phase, since, retryAt, message}; phases are connecting, live, paused, gone, refused and token.
 */
export class Poll {
  constructor(listener) {
    this.listener = listener;
    this.state = {phase: "connecting", since: Date.now(), retryAt: 0, message: ""};
    this.token = kept();
    this.instance = null;
    this.last = 0;
    this.failures = 0;
    this.timer = 0;
    this.asking = false;
    document.addEventListener("visibilitychange", () => this.visibility());
    addEventListener("online", () => this.now());
  }

  now() {
    clearTimeout(this.timer);
    if (!this.asking && this.state.phase !== "token") this.round();
  }

  visibility() {
    if (document.hidden) {
      clearTimeout(this.timer);
      if (this.state.phase === "live") this.enter("paused");
    } else {
      this.now();
    }
  }

  async round() {
    this.asking = true;
    const began = performance.now();
    let wait = EVERY_MS;
    try {
      await this.once();
      this.failures = 0;
      this.enter(document.hidden ? "paused" : "live");
    } catch (error) {
      wait = this.failed(error);
    } finally {
      this.asking = false;
    }
    if (document.hidden || this.state.phase === "token") return;
    const rest = this.failures ? wait : Math.max(100, wait - (performance.now() - began));
    this.timer = setTimeout(() => this.round(), rest);
  }

  async once() {
    const view = await request("v1/view", this.token);
    this.belongsTo(view.service.instance);
    this.listener.view(view);
    for (let more = true, round = 1; more; round += 1) {
      const content = await request(`v1/timeline?after=${this.last}&limit=${ROWS_PER_REQUEST}`, this.token);
      if (this.belongsTo(content.instance)) return;
      this.last = content.last;
      more = content.rows.length >= FEW_ROWS && round < ROUNDS_MAX;
      this.listener.rows(content.rows, content.forgotten, more);
    }
  }

  /** True if the service was restarted since: its earlier rows are void. */
  belongsTo(instance) {
    if (instance === this.instance) return false;
    const again = this.instance !== null;
    this.instance = instance;
    this.last = 0;
    if (again) this.listener.restarted();
    return again;
  }

  failed(error) {
    if (error instanceof Refused && error.status === 401) {
      this.enter("token", this.token ? UNKNOWN_TOKEN : "");
      return 0;
    }
    const wait = Math.min(BACKOFF_MAX_MS, EVERY_MS * 2 ** this.failures);
    this.failures += 1;
    const retryAt = Date.now() + wait;
    if (error instanceof Refused) {
      this.enter("refused", `${error.message} (${error.code})`, retryAt);
    } else if (error instanceof Gone) {
      this.enter("gone", "", retryAt);
    } else {
      console.error(error); // Neither the service nor the network: a bug of this page.
      this.enter("refused", `this page could not show the answer: ${error.message}`, retryAt);
    }
    return wait;
  }

  enter(phase, message = "", retryAt = 0) {
    const since = phase === this.state.phase ? this.state.since : Date.now();
    this.state = {phase, since, retryAt, message};
    this.listener.state(this.state);
  }

  use(token) {
    this.token = token;
    try {
      if (token) sessionStorage.setItem(TOKEN, token);
      else sessionStorage.removeItem(TOKEN);
    } catch {
      // Storage may be forbidden; then the token lasts until the page is closed.
    }
    this.enter("connecting");
    this.now();
  }

  story(id) {
    return request(`v1/actions/${encodeURIComponent(id)}/story`, this.token);
  }

  /** The timeline as a Chrome trace, a Blob. */
  traceEvents() {
    return request("v1/timeline/trace-events", this.token, (answer) => answer.blob());
  }
}

function kept() {
  try {
    return sessionStorage.getItem(TOKEN) ?? "";
  } catch {
    return "";
  }
}
