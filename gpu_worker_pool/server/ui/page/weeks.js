// GPU-hours of each owner by week: a row for each owner, a cell for each week, darker with more hours.

import { attribute, byId, el, text } from "./dom.js";
import { hours, parseTime } from "./words.js";

const MOST_SHOWN = 15;
const SHADES = 5;
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

export class Weeks {
  #table = byId("weeks");

  update(answer) {
    const shown = answer.owners.slice(0, MOST_SHOWN);
    const left = answer.owners.length - shown.length + (answer.other_owners ?? 0);
    const most = Math.max(...shown.flatMap((row) => row.gpu_hours), 0);
    const starts = answer.weeks.map((week) => parseTime(week.since));
    const days = starts.map((start) => el("th", { scope: "col", class: "number" }, DAY.format(start)));
    this.#table.tHead.replaceChildren(el("tr", {}, el("th", { scope: "col" }, "Owner"), ...days, el("th", { scope: "col", class: "number" }, "all")));
    const rows = shown.map((row) => rowOf(row.owner ?? "(no owner named)", row.gpu_hours, most));
    const totals = answer.weeks.map((week) => week.gpu_hours);
    const total = rowOf(left > 0 ? `all, with ${left} more` : "all", totals, 0);
    attribute(total, "class", "total");
    this.#table.tBodies[0].replaceChildren(...rows, total);
    text(byId("weeks-note"), noteOn(answer));
  }

  fail(error) {
    text(byId("weeks-note"), `Not available now: ${error.message}`);
  }
}

function rowOf(name, values, most) {
  const cells = values.map((value) => {
    const shade = most > 0 && value > 0 ? Math.max(1, Math.ceil((SHADES * value) / most)) : 0;
    return el("td", { class: "number", "data-shade": shade }, value === 0 ? "\u2013" : brief(value));
  });
  const sum = values.reduce((a, b) => a + b, 0);
  return el("tr", {}, el("th", { scope: "row" }, el("bdi", {}, name)), ...cells, el("td", { class: "number" }, sum === 0 ? "\u2013" : brief(sum)));
}

/** Three digits are enough: 1234, 123, 12.3, 1.23. */
const brief = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : hours(value));

function noteOn(answer) {
  const notes = ["Weeks begin on Monday, midnight at the server; shared leases are counted too."];
  const complete = parseTime(answer.complete_since);
  if (complete > parseTime(answer.weeks[0]?.since)) notes.push(`Not all leases that ended before ${DAY.format(complete)} are known.`);
  if (answer.unknown_leases) notes.push(`${answer.unknown_leases} leases are left out, because a clock was set meanwhile.`);
  return notes.join(" ");
}
