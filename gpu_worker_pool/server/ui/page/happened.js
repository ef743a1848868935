// The last events, as sentences.

import { attribute, byId, el, KeyedChildren, show, text } from "./dom.js";
import { warningWord } from "./terms.js";
import { clock, details, END_REASONS, gpuNames, holderName, parseTime } from "./words.js";

export class Happened {
  #lines = new KeyedChildren(byId("happened"), () => new Line());

  update(happened, startedAt, clocks) {
    const empty = byId("happened-empty");
    show(empty, happened.length === 0);
    text(empty, `Nothing since the server started, ${clock(startedAt, clocks.nowMs)}.`);
    // Two events of one kind at the same time differ by lease or GPU.
    const keys = happened.map((event) => [event.at, event.kind, event.lease_id, ...event.gpus.map((gpu) => gpu.uuid)].join(" "));
    const byKey = new Map(keys.map((key, i) => [key, happened[i]]));
    const parts = this.#lines.arrange(byKey.keys());
    [...byKey.values()].forEach((event, i) => parts[i].update(event, clocks));
  }
}

class Line {
  #time = el("time");
  #sentence = el("bdi");
  #details = el("bdi", { class: "details" });
  node = el("li", {}, this.#time, el("span", {}, this.#sentence, " ", this.#details));

  update(event, clocks) {
    attribute(this.#time, "datetime", event.at);
    text(this.#time, clock(parseTime(event.at), clocks.nowMs));
    text(this.#sentence, sentence(event));
    text(this.#details, details(event));
  }
}

function sentence(event) {
  const gpus = gpuNames(event.gpus);
  switch (event.kind) {
    case "queued":
      return `${holderName(event)} waits`;
    case "granted":
      return `${holderName(event)} has ${gpus}`;
    case "warned":
      return event.reason === null ? `${holderName(event)} may keep ${gpus}: its warning is withdrawn` : `${holderName(event)} is about to lose ${gpus}: ${warningWord(event.reason)}`;
    case "ended":
      return event.gpus.length === 0
        ? `${holderName(event)} no longer waits: ${endOf(event)}`
        : `${holderName(event)} no longer has ${gpus}: ${endOf(event)}`;
    case "drained":
      return `${gpus} is free of the processes of ${holderName(event)}`;
    case "out_of_service":
      return `${gpus} out of service: ${event.reason ?? "no reason given"}`;
    case "in_service":
      return `${gpus} back in service`;
    default:
      return `${event.kind} ${gpus}`;
  }
}

/** How a lease ended, by whom and why, as far as it is known. */
function endOf(event) {
  const how = event.by ? `${event.reason} by ${event.by}` : (END_REASONS[event.reason] ?? event.reason);
  return event.note ? `${how}: ${event.note}` : how;
}
