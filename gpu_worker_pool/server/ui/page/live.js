// Calls to the server, and the live pool: when the event stream reports a change, the page reads the pool again. Without a stream
// it reads every few seconds. Without an answer it shows that.

import { readView } from "./pool.js";
import { useEffect, useRef, useState } from "./vendor/preact.js";

const ANSWER_WITHIN_MS = 15_000;

/** `status` is that of the answer; null if there was none. `isServers` tells whether the GPU server itself has refused. */
export class Refusal extends Error {
  constructor(message, status = null, isServers = false) {
    super(message);
    this.status = status;
    this.isServers = isServers;
  }
}

/** Make a call. An error answer becomes a Refusal with the server's message. */
export async function ask(path, { method = "GET", body = null, token = null, withinMs = ANSWER_WITHIN_MS } = {}) {
  const headers = { Accept: "application/json" };
  if (token !== null) headers.Authorization = `Bearer ${token}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === null ? null : JSON.stringify(body),
      cache: "no-store",
      // A proxy in front may need cookies; the server itself ignores them.
      credentials: "same-origin",
      redirect: "error",
      referrerPolicy: "no-referrer",
      signal: AbortSignal.timeout(withinMs),
    });
  } catch (error) {
    throw new Refusal(error.name === "TimeoutError" ? "the server does not answer" : "the server cannot be reached");
  }
  const answer = await response.json().catch(() => null);
  const detail = typeof answer?.detail === "string" ? answer.detail : null;
  if (!response.ok) throw new Refusal(detail ?? `the answer has status ${response.status}`, response.status, detail !== null);
  if (answer === null) throw new Refusal("the answer cannot be read; is it from the GPU server?", response.status);
  return answer;
}

const SOON_MS = 3000;
// Answers may be slightly older than the time that they state.
const LAG_MS = 2000;

/**
 * The answer to a call that is repeated while the page is visible and `isOn`, as `{answer, error}`. It is repeated soon when `changedAt`,
 * the time of the last event, grows.
 */
export function useRepeated(path, everyMs, isOn, changedAt = 0) {
  const [state, set] = useState({ path: null, answer: null, error: null });
  const asked = useRef({ path: null, at: -Infinity });
  useEffect(() => {
    if (!isOn || path === null) return undefined;
    let timer = null;
    let isOver = false;
    const plan = (ms) => {
      clearTimeout(timer);
      timer = setTimeout(repeat, ms);
    };
    async function repeat() {
      plan(everyMs);
      if (document.hidden) return;
      asked.current = { path, at: performance.now() };
      try {
        const answer = await ask(path);
        if (isOver) return;
        set({ path, answer, error: null });
        // The server may make one answer for several callers: this one may be older than the last event.
        if (Date.parse(answer.until) < changedAt + LAG_MS) plan(SOON_MS);
      } catch (error) {
        if (!isOver) set((before) => ({ ...before, error: error.message }));
      }
    }
    plan(asked.current.path === path ? Math.max(0, asked.current.at + SOON_MS - performance.now()) : 0);
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [path, everyMs, isOn, changedAt]);
  return state.path === path ? state : { answer: null, error: state.error };
}

// The server makes one answer for all pages that ask at about the same time, so no page needs to ask more often.
const PACE_S = 0.5;
const READ_EVERY_MS = 1000;
// All pages learn of a change at once; they must not all ask at once.
const SPREAD_MS = 300;
// Renewals are not reported, so the page reads now and then without an event.
const QUIET_READ_EVERY_MS = 10_000;
const POLL_EVERY_MS = 3000;
const RETRY_EVERY_MS = 2000;
const POOL_WITHIN_MS = 5000;
// A stream that came back is trusted after this time: the word in the header must not flicker.
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

  /** The start of the paths: `fleet/` on a box of a fleet, so that the whole fleet is meant. */
  scope = "";

  /** The Refusal that the last call ended with; null if it was answered. */
  failure = null;

  /** `onView` is called with each answer, `onState` when the `state` may have changed. */
  constructor(onView, onState) {
    this.#onView = onView;
    this.#onState = onState;
  }

  /** connecting, live, polling (without the stream), paused (the server has no leader or database) or lost (no answer). */
  get state() {
    if (this.failure !== null) return this.failure.isServers ? "paused" : "lost";
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
      view = readView(await ask(`${this.scope}ui/data/pool`, { withinMs: POOL_WITHIN_MS }));
      this.#hasAnswered = true;
      this.failure = null;
      this.#silenceMs = Math.min(Math.max(3000 * view.refreshS, LEAST_SILENCE_MS), MOST_SILENCE_MS);
    } catch (error) {
      this.failure = error;
    } finally {
      this.#isReading = false;
    }
    if (view?.isInFleet && this.scope === "") {
      this.scope = "fleet/";
      this.#open();
      this.read();
    } else if (view !== null) this.#onView(view);
    this.#onState();
  }

  #open() {
    this.#close();
    const stream = new EventSource(`${this.scope}events?pace_s=${PACE_S}`);
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
    const everyMs = this.failure !== null ? RETRY_EVERY_MS : this.#isReliable() ? QUIET_READ_EVERY_MS : POLL_EVERY_MS;
    if (now - this.#readAt >= everyMs) this.read();
    this.#onState();
  }
}
