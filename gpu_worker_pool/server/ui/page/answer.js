// The first lines of the page: is there a GPU for me and when, how the GPUs are used, what is mine, what needs attention.

import { answerOf, attentionOf, countKinds, filtered, leftWords, mineOf, modelsOf, startWords } from "./facts.js";
import { KINDS } from "./pool.js";
import { EndButton, Text } from "./parts.js";
import { html, useState } from "./vendor/preact.js";
import { gpuNames, NONE, plain, plural, start } from "./words.js";

/** The sentence, and the starts of a request that is made now: in a line for one model, in a table for several. */
export function Answer({ page }) {
  const { view, nowMs } = page;
  const models = modelsOf(view);
  const isFree = models.some((each) => each.kinds.has("free")) && view.pool.trouble === null;
  return html`<section class="answer" aria-label="Is there a GPU?">
    <p class="headline" data-free=${isFree || null}>${answerOf(view, models, nowMs)}</p>
    ${models.length === 1 && html`<${Starts} starts=${models[0].starts.filter((one) => isFree || one.gpus > 1)} nowMs=${nowMs} />`}
    ${models.length > 1 && html`<${Models} page=${page} models=${models} />`}
  </section>`;
}

function Starts({ starts, nowMs }) {
  // The sentence says it if nothing is known.
  if (!starts.some((one) => Number.isFinite(one.at))) return null;
  return html`<p class="starts">Ask now for ${startWords(starts, nowMs).map(({ gpus, words }, i) => html`${i > 0 && " · "}<span class="start">
    <b>${gpus}</b>: ${words}</span>`)}</p>`;
}

function Models({ page, models }) {
  const { nowMs, url, go } = page;
  const kinds = [...countKinds(page.view.pool.gpus).keys()];
  const counts = [...new Set(models.flatMap((each) => each.starts.map((one) => one.gpus)))].sort((a, b) => a - b);
  return html`<div class="scroll" role="region" aria-label="Models" tabindex="0"><table class="models">
    <thead><tr>
      <th scope="col">Model</th>
      ${kinds.map((kind) => html`<th scope="col" class="number">${KINDS[kind]}</th>`)}
      ${counts.map((count, i) => html`<th scope="col">${i === 0 ? `ask now: ${plural(count, "GPU")}` : count}</th>`)}
    </tr></thead>
    <tbody>
      ${models.map((each) => html`<tr key=${each.model}>
        <th scope="row"><button type="button" class="link" aria-pressed=${String(url.show === each.model)} title=${each.model}
          onClick=${() => go({ show: url.show === each.model ? "all" : each.model })}><bdi>${each.title}</bdi></button></th>
        ${kinds.map((kind) => html`<td class="number" data-kind=${each.kinds.has(kind) ? kind : null}>${each.kinds.get(kind) ?? NONE}</td>`)}
        ${counts.map((count) => {
          const one = each.starts.find(({ gpus }) => gpus === count);
          return html`<td>${one === undefined ? NONE : start(one.at, one.basis, nowMs)}</td>`;
        })}
      </tr>`)}
    </tbody>
  </table></div>`;
}

const SHAPES = { gpus: "GPUs", leases: "leases", timeline: "timeline" };
const EXTRA = { idle: "idle", mine: "mine" };

/** How many GPUs are of each kind, which adds up to all; each is a filter. */
export function Summary({ page, shape, shapes }) {
  const { view, url, go, owner } = page;
  const { counts } = filtered(view, url, owner);
  const all = countKinds(view.pool.gpus);
  const isModel = !["all", ...Object.keys(KINDS), ...Object.keys(EXTRA)].includes(url.show);
  // A chip that is chosen stays, also when it counts none.
  const chips = ["all", ...Object.keys(KINDS), ...Object.keys(EXTRA)].filter((kind) => kind === "all" || kind === url.show || (counts.get(kind) ?? 0) > 0);
  return html`<section class="summary" aria-label="Summary">
    <div class="share" role="img" aria-label=${[...all].map(([kind, count]) => `${count} ${KINDS[kind]}`).join(", ") || "no GPUs"}>
      ${[...all].map(([kind, count]) => html`<i key=${kind} data-kind=${kind} style=${{ flexGrow: count }}></i>`)}
    </div>
    <div class="chips" role="group" aria-label="Show only">
      ${chips.map((kind) => html`<button key=${kind} type="button" data-kind=${kind} aria-pressed=${String(url.show === kind)}
        onClick=${() => go({ show: url.show === kind ? "all" : kind })}>
        <i class="dot" aria-hidden="true"></i>${KINDS[kind] ?? EXTRA[kind] ?? "all"} <b>${counts.get(kind) ?? 0}</b>
      </button>`)}
      ${isModel && html`<button type="button" aria-pressed="true" onClick=${() => go({ show: "all" })}>${url.show} ✕</button>`}
    </div>
    <label class="find"><span class="hidden">Find</span><input type="search" autocomplete="off" spellcheck="false" placeholder="find owner, job, GPU…"
      value=${url.find} onInput=${(event) => go({ find: event.target.value }, { isTyping: true })} /></label>
    <div class="chips shapes" role="group" aria-label="Show as">${shapes.map((each) => html`<button key=${each} type="button" aria-pressed=${String(each === shape)}
      onClick=${() => go({ as: each })}>${SHAPES[each]}</button>`)}</div>
  </section>`;
}

export function Mine({ page }) {
  const { view, nowMs, owner } = page;
  const { held, waiting } = mineOf(view.pool, owner);
  const parts = [
    ...held.map((lease) => `${gpuNames(lease.gpus, view.isFleet)}, ${leftWords(lease, view, nowMs).replace("\u2013", "no limit")}`),
    ...waiting.map((lease) => `${ordinal(lease.position)} of ${view.pool.queueLength}, ${Number.isFinite(lease.start.at) ? start(lease.start.at, lease.start.basis, nowMs) : "start unknown"}`),
  ];
  if (parts.length === 0) return null;
  return html`<p class="mine"><i class="corner"
    aria-hidden="true"></i>You: ${parts.slice(0, 3).join(" · ")}${parts.length > 3 ? ` and ${parts.length - 3} more` : ""}</p>`;
}

function ordinal(position) {
  if (position === null) return "waiting";
  const last = position % 100 >= 11 && position % 100 <= 13 ? 0 : position % 10;
  return `${position}${["th", "st", "nd", "rd"][last] ?? "th"}`;
}

const FEW = 2;

/** What an operator should look at; nothing if there is nothing. */
export function Attention({ page }) {
  const { view, nowMs, go, copy } = page;
  const [isWhole, setWhole] = useState(false);
  const found = attentionOf(view, nowMs);
  if (found.length === 0) return null;
  const shown = isWhole ? found : found.slice(0, found.length === FEW + 1 ? FEW + 1 : FEW);
  return html`<section class="attention" aria-label="Needs attention">
    <ul>
      ${shown.map((item) => html`<li key=${item.key} data-level=${item.level}>
        <span class="clamped" title=${plain(item.words)}><${Text} parts=${item.words} /></span>
        ${item.lease && html`<${EndButton} lease=${item.lease} page=${page} />`}
        ${item.isOutside && html`<button type="button" onClick=${() => copy(plain(item.words), "the message")}>Copy</button>`}
        ${item.gpu && html`<button type="button" onClick=${() => go({ gpu: item.gpu.key })}>Show</button>`}
      </li>`)}
    </ul>
    ${found.length > shown.length && html`<button type="button" class="link" onClick=${() => setWhole(true)}>${found.length - shown.length} more</button>`}
  </section>`;
}
