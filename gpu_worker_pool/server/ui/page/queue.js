// The waiters in order, each with its reason.

import { attribute, byId, el, KeyedChildren, Pieces, show, text } from "./dom.js";
import { startOf, termsOf } from "./terms.js";
import { clock, details, duration, holderName, otherLabels } from "./words.js";

// In the grid's view so many are shown until the user asks for all: the GPUs below must stay in sight.
const FEW = 3;

export class Queue {
  #more = el("p", { class: "quiet" });
  #waiters;
  #pieces = new Pieces();
  #isWhole = false;
  #last = null;

  constructor(actions) {
    const list = el("ol", { class: "queue" });
    byId("queues").append(list, this.#more);
    this.#waiters = new KeyedChildren(list, () => new Waiter(actions));
    byId("queue-all").addEventListener("click", () => {
      this.#isWhole = !this.#isWhole;
      this.update(...this.#last);
    });
  }

  /** With `isShort`, only the first waiters and the user's own are shown until the user asks for all. */
  update(own, access, mine, isShort) {
    this.#last = [own, access, mine, isShort];
    const { pool, clocks } = own;
    const total = pool.queueLength;
    text(byId("queue-length"), total ? String(total) : "");
    show(byId("queue-empty"), total === 0);
    const isWanted = (lease, i) => !isShort || this.#isWhole || i < FEW || mine.owns(lease);
    const shown = pool.queue.filter(isWanted);
    this.#waiters.arrange(shown.map((lease) => lease.key)).forEach((waiter, i) => {
      this.#pieces.plan(waiter, () => waiter.update(shown[i], pool, clocks, access, mine));
    });
    const hidden = total - pool.queue.length;
    show(this.#more, hidden > 0 && shown.length === pool.queue.length);
    text(this.#more, `and ${hidden} more`);
    const all = byId("queue-all");
    show(all, isShort && pool.queue.length > FEW);
    attribute(all, "aria-expanded", String(this.#isWhole));
    text(all, this.#isWhole ? "Show the first only" : `Show all ${pool.queue.length}`);
  }
}

class Waiter {
  #position = el("span", { class: "position" });
  #who = el("bdi");
  #details = el("bdi", { class: "details" });
  #times = el("span", { class: "times" });
  #reason = el("p", { class: "reason" });
  #start = el("p", { class: "start" });
  #release = el("button", { type: "button", hidden: "" }, "Take out");
  #shown = null;
  node = el(
    "li",
    {},
    this.#position,
    el("div", { class: "body" }, el("p", {}, el("strong", {}, this.#who), " ", this.#details, " ", this.#times), this.#reason, this.#start),
    this.#release,
  );

  constructor(actions) {
    this.#release.addEventListener("click", () => actions.release(this.#shown.lease, this.#shown.pool));
  }

  update(lease, pool, clocks, access, mine) {
    this.#shown = { lease, pool };
    attribute(this.node, "data-mine", mine.owns(lease) || null);
    text(this.#position, String(lease.position ?? ""));
    text(this.#who, holderName(lease));
    text(this.#details, [details(lease), otherLabels(lease.labels)].filter((part) => part !== "").join(" · "));
    const since = `waits ${duration((clocks.nowMs - lease.requested_at) / 1000)}, since ${clock(lease.requested_at, clocks.nowMs)}`;
    const parts = [since, lease.priority ? `priority ${lease.priority}` : "", termsOf(lease, clocks)];
    text(this.#times, parts.filter((part) => part !== "").join(", "));
    text(this.#reason, lease.reason ?? "reason unknown");
    const start = startOf(lease, clocks);
    show(this.#start, start !== "");
    text(this.#start, start);
    show(this.#release, access.mayRelease(lease));
    attribute(this.#release, "aria-label", `Take out of the queue: ${holderName(lease)}, ${lease.id}`);
  }
}
