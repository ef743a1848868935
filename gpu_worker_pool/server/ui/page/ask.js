// Calls to the server. An error answer becomes an Error with the server's message.

const ANSWER_WITHIN_MS = 15_000;

/** `status` is that of the answer; null if there was none. */
export class Refusal extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
  }
}

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
  if (!response.ok) throw new Refusal(answer?.detail ?? `the answer has status ${response.status}`, response.status);
  if (answer === null) throw new Refusal("the answer cannot be read; is it from the GPU server?", response.status);
  return answer;
}

/** A call that is repeated while the page is visible. */
export class Repeated {
  #path;
  #everyMs;
  #onAnswer;
  #onError;
  #askedAt = -Infinity;
  #isAsking = false;

  constructor(path, everyMs, onAnswer, onError = () => {}) {
    this.#path = path;
    this.#everyMs = everyMs;
    this.#onAnswer = onAnswer;
    this.#onError = onError;
  }

  get path() {
    return this.#path;
  }

  set path(path) {
    this.#path = path;
    this.#askedAt = -Infinity;
  }

  /** Repeat the call soon, because its answer has changed. */
  repeatWithin(withinMs) {
    this.#askedAt = Math.min(this.#askedAt, performance.now() - this.#everyMs + withinMs);
  }

  /** Repeat the call if it is due. */
  async repeatIfDue() {
    if (this.#isAsking || performance.now() - this.#askedAt < this.#everyMs) return;
    this.#isAsking = true;
    this.#askedAt = performance.now();
    const path = this.#path;
    try {
      const answer = await ask(path);
      if (path === this.#path) this.#onAnswer(answer);
    } catch (error) {
      this.#onError(error);
    } finally {
      this.#isAsking = false;
    }
  }
}
