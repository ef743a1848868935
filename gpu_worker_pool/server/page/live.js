// The pool as it is: told by the event stream that something changed, the page looks anew. Where there is no stream it
// looks every few seconds, and where there is no answer it says so.

import { ask } from "./ask.js";

// One rendering on the server serves all pages that ask at about the same time, so no page needs to be quicker than this.
const PACE_S = 0.5;
const LOOK_EVERY_MS = 1000;
// All pages are told at once; they do not all ask at once.
const SPREAD_MS = 300;
// Leases are renewed without an event, so that now and then a look is due although nothing was told.
const QUIET_LOOK_EVERY_MS = 10_000;
const POLL_EVERY_MS = 3000;
const RETRY_EVERY_MS = 2000;
// The stream says every 15 s that it is still there; a proxy that swallows it must not be taken for a quiet pool.
const SILENT_AFTER_MS = 40_000;
const REOPEN_AFTER_MS = 5000;

export class Live {
  #onView;
  #onState;
  #stream = null;
  #isOpen = false;
  #hasFailed = false;
  #heardAt = 0;
  #closedAt = -Infinity;
  #timer = null;
  #dueAt = Infinity;
  #lookedAt = -Infinity;
  #isLooking = false;
  #hasAnswered = false;
  #lostAt = null;

  /** `onView` is given each answer, `onState` is told when the `state` may be another one. */
  constructor(onView, onState) {
    this.#onView = onView;
    this.#onState = onState;
  }

  /** connecting, live, polling (without the stream) or lost (without an answer). */
  get state() {
    if (this.#lostAt !== null) return "lost";
    if (!this.#hasAnswered) return "connecting";
    if (this.#isOpen) return "live";
    return this.#hasFailed ? "polling" : "connecting";
  }

  start() {
    this.#open();
    this.look();
    setInterval(() => this.#tend(), 1000);
    document.addEventListener("visibilitychange", () => this.look());
  }

  /** Look now; whoever just changed something does not wait to see it. */
  look() {
    this.#lookAt(performance.now());
  }

  #lookAt(at) {
    if (at >= this.#dueAt) return;
    this.#dueAt = at;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#look(), Math.max(0, at - performance.now()));
  }

  async #look() {
    this.#dueAt = Infinity;
    // Nobody looks at a page in the background, and the server has better things to do.
    if (document.hidden) return;
    if (this.#isLooking) {
      this.#lookAt(performance.now() + SPREAD_MS);
      return;
    }
    this.#isLooking = true;
    this.#lookedAt = performance.now();
    try {
      const view = await ask("ui/data/pool");
      this.#hasAnswered = true;
      this.#lostAt = null;
      this.#onView(view);
    } catch (error) {
      this.#lostAt ??= performance.now();
    } finally {
      this.#isLooking = false;
      this.#onState();
    }
  }

  #open() {
    this.#stream?.close();
    this.#heardAt = performance.now();
    this.#closedAt = -Infinity;
    this.#stream = new EventSource(`events?pace_s=${PACE_S}`);
    const stream = this.#stream;
    stream.addEventListener("open", () => {
      this.#isOpen = true;
      this.#hear();
      this.look();
      this.#onState();
    });
    stream.addEventListener("still_here", () => this.#hear());
    stream.addEventListener("changed", () => {
      this.#hear();
      const soonest = Math.max(performance.now(), this.#lookedAt + LOOK_EVERY_MS);
      this.#lookAt(soonest + Math.random() * SPREAD_MS);
    });
    stream.addEventListener("error", () => {
      if (stream !== this.#stream) return;
      this.#isOpen = false;
      this.#hasFailed = true;
      // The browser opens it again by itself, with the id of the last event, unless it has closed it for good.
      if (stream.readyState === EventSource.CLOSED) this.#closedAt = performance.now();
      this.look();
      this.#onState();
    });
  }

  #hear() {
    this.#heardAt = performance.now();
  }

  #tend() {
    const now = performance.now();
    if (document.hidden) return;
    if (this.#isOpen && now - this.#heardAt > SILENT_AFTER_MS) {
      this.#isOpen = false;
      this.#hasFailed = true;
      this.#closedAt = now;
      this.#stream.close();
    }
    if (this.#stream.readyState === EventSource.CLOSED && now - this.#closedAt > REOPEN_AFTER_MS) this.#open();
    const everyMs = this.#lostAt !== null ? RETRY_EVERY_MS : this.#isOpen ? QUIET_LOOK_EVERY_MS : POLL_EVERY_MS;
    if (now - this.#lookedAt >= everyMs) this.look();
  }
}
