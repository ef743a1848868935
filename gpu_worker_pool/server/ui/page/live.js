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
const ANSWER_WITHIN_MS = 5000;
// A stream that came back is trusted when it has stayed for so long: the word in the header must not flicker.
const STEADY_AFTER_MS = 5000;
// A stream tells of each reading, and says every 15 s that it is still there. One that is silent for longer may be held back
// by a proxy, and is not relied on; in the end it is opened anew.
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
  #heardAt = 0;
  #failedAt = -Infinity;
  #timer = null;
  #dueAt = Infinity;
  #lookedAt = -Infinity;
  #isLooking = false;
  #hasAnswered = false;
  #silenceMs = MOST_SILENCE_MS;

  /** Why there is no answer; null where there is one. */
  whyLost = null;

  /** `onView` is given each answer, `onState` is told when the `state` may be another one. */
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
    this.look();
    setInterval(() => this.#tend(), 1000);
    document.addEventListener("visibilitychange", () => {
      // A browser opens six connections to a server and no more: a page that nobody looks at must not keep one.
      if (document.hidden) this.#close();
      else {
        this.#open();
        this.look();
      }
    });
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
    let view = null;
    try {
      view = checked(await ask("ui/data/pool", { withinMs: ANSWER_WITHIN_MS }));
      this.#hasAnswered = true;
      this.whyLost = null;
      this.#silenceMs = Math.min(Math.max(3000 * view.refresh_interval_s, LEAST_SILENCE_MS), MOST_SILENCE_MS);
    } catch (error) {
      this.whyLost = error.message;
    } finally {
      this.#isLooking = false;
    }
    if (view !== null) this.#onView(view);
    this.#onState();
  }

  #open() {
    this.#close();
    const stream = new EventSource(`events?pace_s=${PACE_S}`);
    this.#stream = stream;
    this.#openedAt = performance.now();
    this.#hear();
    stream.addEventListener("open", () => {
      this.#isOpen = true;
      this.#hear();
      this.look();
    });
    stream.addEventListener("still_here", () => this.#hear());
    stream.addEventListener("changed", () => {
      this.#hear();
      const soonest = Math.max(performance.now(), this.#lookedAt + LOOK_EVERY_MS);
      this.#lookAt(soonest + Math.random() * SPREAD_MS);
    });
    stream.addEventListener("error", () => {
      if (stream !== this.#stream) return;
      // The browser opens it again by itself, with the id of the last event, unless it has closed it for good.
      this.#isOpen = false;
      this.#failedAt = performance.now();
      this.look();
    });
  }

  #close() {
    this.#stream?.close();
    this.#isOpen = false;
  }

  #hear() {
    this.#heardAt = performance.now();
  }

  #isReliable() {
    const now = performance.now();
    return this.#isOpen && now - this.#heardAt < this.#silenceMs && now - this.#failedAt > STEADY_AFTER_MS;
  }

  #tend() {
    if (document.hidden) return;
    const now = performance.now();
    const isClosed = this.#stream.readyState === EventSource.CLOSED && now - this.#failedAt > REOPEN_AFTER_MS;
    if (isClosed || now - this.#heardAt > REOPEN_AFTER_SILENCE_MS) {
      if (!isClosed) this.#failedAt = now;
      this.#open();
    }
    const everyMs = this.whyLost !== null ? RETRY_EVERY_MS : this.#isReliable() ? QUIET_LOOK_EVERY_MS : POLL_EVERY_MS;
    if (now - this.#lookedAt >= everyMs) this.look();
  }
}

/** The answer, if it is one: between a new server and an old page, or with a proxy between, it may be anything. */
function checked(view) {
  if (!Array.isArray(view?.pool?.gpus) || !Array.isArray(view.happened) || !Number.isFinite(Date.parse(view.now))) {
    throw new Error("the server's answer cannot be read; reload the page");
  }
  return view;
}
