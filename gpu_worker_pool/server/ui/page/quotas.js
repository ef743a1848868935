// The quotas of owners, and what they have and used lately. Without quotas and fair share there is nothing to show.

import { byId, el, KeyedChildren, show, text } from "./dom.js";
import { hours } from "./words.js";

const MOST_SHOWN = 20;

export class Quotas {
  #rows = new KeyedChildren(byId("quotas").tBodies[0], () => new Row());

  update(answer) {
    const isUsed = answer.quotas.length > 0 || answer.fair_share;
    show(byId("quotas-section"), isUsed);
    if (!isUsed) return;
    const all = [...answer.quotas, ...answer.others];
    const shown = all.slice(0, MOST_SHOWN);
    this.#rows.arrange(shown.map((quota) => quota.owner)).forEach((row, i) => row.update(shown[i]));
    const order = answer.fair_share ? "Of equal priority, the owner with the larger share factor is served first." : "Of equal priority, the first come is served first.";
    text(byId("quotas-note"), all.length > shown.length ? `${order} ${all.length - shown.length} more owners are not shown.` : order);
  }

  fail(error) {
    text(byId("quotas-note"), `Not available now: ${error.message}`);
  }
}

const amount = (value) => (value === null ? "\u2013" : String(value));

class Row {
  #owner = el("bdi");
  #cells = Array.from({ length: 4 }, () => el("td", { class: "number" }));
  node = el("tr", {}, el("th", { scope: "row" }, this.#owner), ...this.#cells);

  update(quota) {
    text(this.#owner, quota.owner === "*" ? "all others" : quota.owner);
    const used = quota.used_gpu_hours === null ? "\u2013" : hours(quota.used_gpu_hours);
    const values = [amount(quota.held_gpus), amount(quota.gpus), used, amount(quota.share_factor)];
    values.forEach((value, i) => text(this.#cells[i], value));
  }
}
