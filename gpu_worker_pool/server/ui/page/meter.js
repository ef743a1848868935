// A number from 0 to 100 % as a bar, with a mark at its threshold.

import { attribute, el, text } from "./dom.js";
import { UNKNOWN } from "./words.js";

export class Meter {
  #fill = el("i", { class: "fill" });
  #mark = el("i", { class: "mark" });
  #value = el("span", { class: "value" });
  #bar;
  #shown = null;

  constructor(name, kind) {
    this.name = name;
    this.#bar = el("div", { class: "bar", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100 }, this.#fill, this.#mark);
    this.node = el("div", { class: "meter", "data-kind": kind }, el("span", { class: "name" }, name), this.#value, this.#bar);
  }

  update(percent, threshold, words) {
    const isKnown = percent !== null;
    text(this.#value, words);
    const width = isKnown ? Math.min(Math.max(percent, 0), 100) : 0;
    attribute(this.#bar, "aria-valuenow", width.toFixed(0));
    attribute(this.#bar, "aria-valuetext", `${isKnown ? words : UNKNOWN}; granted below ${threshold} %`);
    attribute(this.#bar, "data-over", isKnown && percent >= threshold);
    attribute(this.#bar, "title", `${this.name}: ${words}; a GPU is granted below ${threshold} %`);
    // Reading a style is slower than comparing the last value.
    const shown = `${width.toFixed(1)} ${threshold}`;
    if (shown === this.#shown) return;
    this.#shown = shown;
    this.#fill.style.width = `${width.toFixed(1)}%`;
    this.#mark.style.left = `${Math.min(threshold, 99.5)}%`;
  }
}
