// The live pool: when the event stream reports a change, the page reads the pool again. Without a stream it reads every
// few seconds. Without an answer it shows that.

import { ask } from "./ask.js";

// The server makes one answer for all pages that ask at about the same time, so no page needs to ask more often.
const PACE_S = 0.5;
const READ_EVERY_MS = 1000;
// All pages learn of a change at once; they must not all ask at once.
const SPREAD_MS = 300;
// Renewals are not reported, so the page reads now and then without an event.
const QUIET_READ_EVERY_MS = 10_000;
const POLL_EVERY_MS = 3000;
const RETRY_EVERY_MS = 2000;
const ANSWER_WITHIN_MS = 5000;
// A stream that came back is trusted after so long: the word in the header must not flicker.
const STEADY_AFTER_MS = 5000;
// A stream reports each reading, and sends a heartbeat every 15 s. A proxy may hold back a stream that is silent for
// longer: it is not relied on, and is opened again in the end.
const LEAST_SILENCE_MS = 5000;
const MOST_SILENCE_MS = 20_000;
const REOPEN_AFTER_SILENCE_MS = 40_000;
const REOPEN_AFTER_MS = 5000;

export class Live {
  #onView;
  #onState;
  #stream = null;
  #isOpen = false;
  #openedAt = 0;
  #lastMessageAt = 0;
  #failedAt = -Infinity;
  #timer = null;
  #dueAt = Infinity;
  #readAt = -Infinity;
  #isReading = false;
  #hasAnswered = false;
  #silenceMs = MOST_SILENCE_MS;
  #scope = "";

  /** Whether the server has the calls of a whole fleet, as far as is known. */
  hasFleetCalls = true;

  /** Why there is no answer; null if there is one. */
  whyLost = null;

  /** `onView` is called with each answer, `onState` when the `state` may have changed. */
  constructor(onView, onState) {
    this.#onView = onView;
    this.#onState = onState;
  }

  /** connecting, live, polling (without the stream) or lost (without an answer). */
  get state() {
    if (this.whyLost !== null) return "lost";
    if (!this.#hasAnswered) return "connecting";
    if (this.#isReliable()) return "live";
    return performance.now() - this.#openedAt < STEADY_AFTER_MS && this.#failedAt === -Infinity ? "connecting" : "polling";
  }

  start() {
    this.#open();
    this.read();
    setInterval(() => this.#keepAlive(), 1000);
    document.addEventListener("visibilitychange", () => {
      // A browser opens at most six connections to a server: a hidden page must not keep one.
      if (document.hidden) this.#close();
      else {
        this.#open();
        this.read();
      }
    });
  }

  /** Read the pool now, for example because the user has changed something. */
  read() {
    this.#scheduleRead(performance.now());
  }

  /** Show the whole fleet (`fleet/`), or this box. */
  set scope(scope) {
    if (scope === this.#scope) return;
    this.#scope = scope;
    this.#open();
    this.read();
  }

  get scope() {
    return this.#scope;
  }

  #scheduleRead(at) {
    if (at >= this.#dueAt) return;
    this.#dueAt = at;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#readPool(), Math.max(0, at - performance.now()));
  }

  async #readPool() {
    this.#dueAt = Infinity;
    // A hidden page needs no answers.
    if (document.hidden) return;
    if (this.#isReading) {
      this.#scheduleRead(performance.now() + SPREAD_MS);
      return;
    }
    this.#isReading = true;
    this.#readAt = performance.now();
    let view = null;
    try {
      view = checked(await ask(`${this.#scope}ui/data/pool`, { withinMs: ANSWER_WITHIN_MS }));
      this.#hasAnswered = true;
      this.whyLost = null;
      this.#silenceMs = Math.min(Math.max(3000 * view.refresh_interval_s, LEAST_SILENCE_MS), MOST_SILENCE_MS);
    } catch (error) {
      // A server of an older version has no calls of the whole fleet: its own box is shown.
      if (error.status === 404 && this.#scope !== "") this.hasFleetCalls = false;
      this.whyLost = error.message;
    } finally {
      this.#isReading = false;
    }
    if (view !== null) this.#onView(view);
    this.#onState();
  }

  #open() {
    this.#close();
    const stream = new EventSource(`${this.#scope}events?pace_s=${PACE_S}`);
    this.#stream = stream;
    this.#openedAt = performance.now();
    this.#noteMessage();
    stream.addEventListener("open", () => {
      this.#isOpen = true;
      this.#noteMessage();
      this.read();
    });
    stream.addEventListener("still_here", () => this.#noteMessage());
    stream.addEventListener("changed", () => {
      this.#noteMessage();
      const soonest = Math.max(performance.now(), this.#readAt + READ_EVERY_MS);
      this.#scheduleRead(soonest + Math.random() * SPREAD_MS);
    });
    stream.addEventListener("error", () => {
      if (stream !== this.#stream) return;
      // The browser reopens the stream, unless it has closed it for good.
      this.#isOpen = false;
      this.#failedAt = performance.now();
      this.read();
    });
  }

  #close() {
    this.#stream?.close();
    this.#isOpen = false;
  }

  #noteMessage() {
    this.#lastMessageAt = performance.now();
  }

  #isReliable() {
    const now = performance.now();
    return this.#isOpen && now - this.#lastMessageAt < this.#silenceMs && now - this.#failedAt > STEADY_AFTER_MS;
  }

  #keepAlive() {
    if (document.hidden) return;
    const now = performance.now();
    const isClosed = this.#stream.readyState === EventSource.CLOSED && now - this.#failedAt > REOPEN_AFTER_MS;
    if (isClosed || now - this.#lastMessageAt > REOPEN_AFTER_SILENCE_MS) {
      if (!isClosed) this.#failedAt = now;
      this.#open();
    }
    const everyMs = this.whyLost !== null ? RETRY_EVERY_MS : this.#isReliable() ? QUIET_READ_EVERY_MS : POLL_EVERY_MS;
    if (now - this.#readAt >= everyMs) this.read();
  }
}

/** Check an answer: an old page may ask a new server, and a proxy may answer anything. */
function checked(view) {
  if (!Array.isArray(view?.pool?.gpus) || !Array.isArray(view.happened) || !Number.isFinite(Date.parse(view.now))) {
    throw new Error("the server's answer cannot be read; reload the page");
  }
  return view;
}
