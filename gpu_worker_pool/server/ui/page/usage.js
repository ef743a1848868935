// GPU-hours by owner since midnight.

import { byId, el, KeyedChildren, text } from "./dom.js";
import { clock, hours, parseTime, plural } from "./words.js";

const MOST_SHOWN = 20;

export class Usage {
  #rows = new KeyedChildren(byId("usage").tBodies[0], () => new Row());

  update(answer) {
    const shown = answer.owners.slice(0, MOST_SHOWN).map((usage) => [`owner ${usage.owner ?? ""}`, usage.owner ?? "(no owner named)", usage]);
    const left = answer.owners.length - shown.length + (answer.others?.owners ?? 0);
    shown.push(["total", left > 0 ? `all, with ${left} more` : "all", answer.total]);
    const most = Math.max(...answer.owners.map(total), 0);
    this.#rows.arrange(shown.map(([key]) => key)).forEach((row, i) => row.update(shown[i][1], shown[i][2], most, shown[i][0] === "total"));
    text(byId("usage-note"), noteOn(answer));
  }

  fail(error) {
    text(byId("usage-note"), `Not available now: ${error.message}`);
  }
}

const total = (usage) => usage.gpu_hours + usage.shared_gpu_hours;

function noteOn(answer) {
  const since = parseTime(answer.since);
  const notes = [`Since ${clock(since)}, midnight at the server.`];
  if (!answer.is_complete) notes.push(`Not all leases that ended before ${clock(parseTime(answer.complete_since))} are known.`);
  if (answer.total.unknown_leases) notes.push(`The duration of ${plural(answer.total.unknown_leases, "lease")} is unknown, because a clock was set.`);
  return notes.join(" ");
}

class Row {
  #owner = el("bdi");
  #bar = el("i", { class: "fill" });
  #cells = ["gpu_hours", "shared_gpu_hours", "leases", "wait_hours"].map((name) => [name, el("td", { class: "number" })]);
  node = el("tr", {}, el("th", { scope: "row" }, this.#owner, el("span", { class: "bar", "aria-hidden": "true" }, this.#bar)), ...this.#cells.map(([, cell]) => cell));

  update(owner, usage, most, isTotal) {
    text(this.#owner, owner);
    this.node.className = isTotal ? "total" : "";
    this.#bar.style.width = `${most > 0 && !isTotal ? (100 * total(usage)) / most : 0}%`;
    for (const [name, cell] of this.#cells) text(cell, name === "leases" ? String(usage.leases) : name === "wait_hours" ? `${hours(usage[name])} h` : hours(usage[name]));
  }
}
