// Poll: fetches the state of the service. Owns every request, the token and the interval. Polls once a second while the
// page is visible, backs off exponentially while the service does not respond, and recovers by itself. Read-only.

const EVERY_MS = 1000;
const BACKOFF_MAX_MS = 10_000;
/* An operator who restarts the service should not wait longer than this for the page to notice. */
const PATIENCE_MS = 10_000;
const ROWS_PER_REQUEST = 5000;
const FEW_ROWS = 500;
/* With fewer in an answer the rest can wait for the next second. */
const ROUNDS_MAX = 50;
/* A service that settles faster than it can be asked must not keep the page from its next view. */
const TOKEN = "tangram.token";
const UNKNOWN_TOKEN = "this service does not know it. It was revoked, or is that of another service.";

export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The service did not respond, or the response was cut off. */
class Gone extends Error {}

async function reach(path, headers) {
  try {
    const answer = await fetch(path, {headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS)});
    return [answer, answer.ok ? await answer.json() : null];
  } catch (error) {
    throw new Gone(String(error));
  }
}

async function ask(path, token) {
  const headers = {Accept: "application/json"};
  if (token) headers.Authorization = `Bearer ${token}`;
  const [answer, found] = await reach(path, headers);
  if (answer.ok) return found;
  let code = "unknown";
  let message = `the service answered ${answer.status}`;
  try {
    const {error} = await answer.json();
    code = String(error.code);
    message = String(error.message);
  } catch {
    // Not from the service itself; a proxy may answer in its place. The status says enough.
  }
  throw new Refused(answer.status, code, message);
}

/**
 * `told` has: view(view), rows(rows, forgotten), restarted(), state(state).
 * A state is {phase, since, retryAt, message}; phases are connecting, live, paused, gone, refused and token.
 */
export class Poll {
  constructor(told) {
    this.told = told;
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
    const view = await ask("v1/view", this.token);
    this.belongsTo(view.service.instance);
    this.told.view(view);
    for (let more = true, round = 1; more; round += 1) {
      const found = await ask(`v1/timeline?after=${this.last}&limit=${ROWS_PER_REQUEST}`, this.token);
      if (this.belongsTo(found.instance)) return;
      this.last = found.last;
      more = found.rows.length >= FEW_ROWS && round < ROUNDS_MAX;
      this.told.rows(found.rows, found.forgotten, more);
    }
  }

  /** True if the service was started again since: what was kept of the one before is void. */
  belongsTo(instance) {
    if (instance === this.instance) return false;
    const again = this.instance !== null;
    this.instance = instance;
    this.last = 0;
    if (again) this.told.restarted();
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
      console.error(error); // Neither the service nor the network: a fault of this page, which must not go unseen.
      this.enter("refused", `this page could not show the answer: ${error.message}`, retryAt);
    }
    return wait;
  }

  enter(phase, message = "", retryAt = 0) {
    const since = phase === this.state.phase ? this.state.since : Date.now();
    this.state = {phase, since, retryAt, message};
    this.told.state(this.state);
  }

  use(token) {
    this.token = token;
    try {
      if (token) sessionStorage.setItem(TOKEN, token);
      else sessionStorage.removeItem(TOKEN);
    } catch {
      // Storage may be forbidden; then the token lasts until the page is left.
    }
    this.enter("connecting");
    this.now();
  }

  story(id) {
    return ask(`v1/actions/${encodeURIComponent(id)}/story`, this.token);
  }
}

function kept() {
  try {
    return sessionStorage.getItem(TOKEN) ?? "";
  } catch {
    return "";
  }
}
