// The view Usage: GPU-hours of each owner, quotas, and what happened last.

import { Text } from "./parts.js";
import { useRepeated } from "./live.js";
import { html } from "./vendor/preact.js";
import { clock, dateOf, END_REASONS, gpuNames, holderName, hours, name, NONE, parseTime, plural, runs, say, WARNINGS } from "./words.js";

const TODAY_EVERY_MS = 60_000;
const PAST_EVERY_MS = 3_600_000;
const QUOTAS_EVERY_MS = 10_000;
const MOST_OWNERS = 20;
const WEEKS = 4;

/** The spans of the table, in the user's time zone: today, this week and those before it. */
export function spansOf(nowMs) {
  const now = new Date(nowMs);
  const monday = (weeks) => new Date(now.getFullYear(), now.getMonth(), now.getDate() - ((now.getDay() + 6) % 7) - 7 * weeks).getTime();
  const today = { title: "today", since: new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime(), until: null };
  const weeks = Array.from({ length: WEEKS }, (_, i) => ({ title: i === 0 ? "this week" : `week of ${dateOf(monday(i))}`, since: monday(i), until: i === 0 ? null : monday(i - 1) }));
  return [today, ...weeks];
}

/** The owners with their GPU-hours in each span, most of the first spans first; `answers` may be null where they are not there yet. */
export function usageRows(answers) {
  const total = (usage) => (usage === undefined ? 0 : usage.gpu_hours + usage.shared_gpu_hours);
  const owners = new Set(answers.flatMap((answer) => (answer?.owners ?? []).map((usage) => usage.owner)));
  const rows = [...owners].map((owner) => {
    const found = answers.map((answer) => answer?.owners.find((usage) => usage.owner === owner));
    return { owner, today: found[0], hours: answers.map((answer, i) => (answer === null ? null : total(found[i]))) };
  });
  const isAny = (row) => row.today?.leases > 0 || row.hours.some((value) => value > 0);
  const sum = (row) => row.hours.slice(1).reduce((a, b) => a + (b ?? 0), 0);
  rows.sort((a, b) => sum(b) - sum(a) || (a.owner ?? "").localeCompare(b.owner ?? ""));
  return { rows: rows.filter(isAny), total: answers.map((answer) => (answer === null ? null : total(answer.total))) };
}

export function Usage({ page }) {
  const { view, nowMs, isConnected, scope, changedAt } = page;
  const path = ({ since, until }) => `${scope}usage?since=${since / 1000}${until === null ? "" : `&until=${until / 1000}`}`;
  const spans = spansOf(nowMs);
  const told = spans.map((span, i) => useRepeated(path(span), span.until === null ? TODAY_EVERY_MS : PAST_EVERY_MS, isConnected, i === 0 ? changedAt : 0));
  const quotas = useRepeated(`${scope}quotas`, QUOTAS_EVERY_MS, isConnected);
  const answers = told.map(({ answer }) => answer);
  const { rows, total } = usageRows(answers);
  const most = Math.max(...rows.flatMap((row) => row.hours.slice(1).map((value) => value ?? 0)), 0);
  const shown = rows.slice(0, MOST_OWNERS);
  return html`<section aria-label="GPU-hours">
      <h2>GPU-hours</h2>
      <div class="scroll" role="region" aria-label="Table of GPU-hours" tabindex="0"><table>
        <thead><tr><th scope="col">owner</th>${spans.map((span) => html`<th scope="col" class="number">${span.title}</th>`)}<th scope="col"
          class="number">leases today</th><th scope="col" class="number">waited today</th></tr></thead>
        <tbody>
          ${shown.map((row) => html`<tr key=${row.owner}><th scope="row"><bdi>${row.owner ?? "(no owner named)"}</bdi></th>
            ${row.hours.map((value, i) => html`<td class=${i > 0 ? "number shaded" : "number"}
              style=${{ "--shade": most > 0 ? (value ?? 0) / most : 0 }}>${value === null ? "" : hours(value)}</td>`)}
            <td class="number">${row.today?.leases || NONE}</td><td class="number">${row.today ? waited(row.today) : NONE}</td></tr>`)}
          <tr class="total"><th
            scope="row">${rows.length > shown.length ? `all, with ${rows.length - shown.length} more` : "all"}</th>${total.map((value) => html`<td
            class="number">${value === null ? "" : hours(value)}</td>`)}<td class="number">${answers[0]?.total.leases || NONE}</td><td
            class="number">${answers[0] ? waited(answers[0].total) : NONE}</td></tr>
        </tbody>
      </table></div>
      <p class="quiet">${noteOn(told, nowMs)}</p>
    </section>
    <${Quotas} answer=${quotas.answer} error=${quotas.error} />
    <${Happened} view=${view} nowMs=${nowMs} />`;
}

const waited = (usage) => (usage.wait_hours < 0.01 ? NONE : `${hours(usage.wait_hours)}\u00a0h`);

function noteOn(told, nowMs) {
  const notes = ["Days and weeks begin at midnight of your time zone, weeks on Monday; shared leases are counted too."];
  const failed = told.find(({ error }) => error !== null);
  if (failed !== undefined) notes.push(`Not available now: ${failed.error}`);
  const oldest = told.at(-1).answer;
  if (oldest !== null && !oldest.is_complete) notes.push(`Not all leases that ended before ${clock(parseTime(oldest.complete_since), nowMs)} are known.`);
  const unknown = told[0].answer?.total.unknown_leases ?? 0;
  if (unknown) notes.push(`The duration of ${plural(unknown, "lease")} is unknown, because a clock was set.`);
  return notes.join(" ");
}

/** Without quotas and fair share there is nothing to show. */
function Quotas({ answer, error }) {
  if (answer === null) return error === null ? null : html`<p class="quiet">Quotas are not available now: ${error}</p>`;
  if (answer.quotas.length === 0 && !answer.fair_share) return null;
  const all = [...answer.quotas, ...answer.others];
  const amount = (value) => (value === null ? NONE : String(Math.round(value * 100) / 100));
  return html`<section aria-label="Quotas">
    <h2>Quotas</h2>
    <p class="quiet">${answer.fair_share ? "Of equal priority, the owner with the larger share factor is served first." : "Of equal priority, the first come is served first."}${all.length > MOST_OWNERS ? ` ${all.length - MOST_OWNERS} more owners are not shown.` : ""}</p>
    <div class="scroll" role="region" aria-label="Table of quotas" tabindex="0"><table>
      <thead><tr><th scope="col">owner</th><th scope="col" class="number">GPUs now</th><th scope="col" class="number">at most</th><th scope="col"
        class="number">GPU-hours lately</th>${answer.fair_share && html`<th scope="col" class="number">share factor</th>`}</tr></thead>
      <tbody>${all.slice(0, MOST_OWNERS).map((quota) => html`<tr key=${quota.owner}><th scope="row">
        <bdi>${quota.owner === "*" ? "all others" : quota.owner}</bdi></th>
        <td class="number">${amount(quota.held_gpus)}</td><td class="number">${amount(quota.gpus)}</td><td
          class="number">${quota.used_gpu_hours === null ? NONE : hours(quota.used_gpu_hours)}</td>${answer.fair_share && html`<td
          class="number">${amount(quota.share_factor)}</td>`}</tr>`)}</tbody>
    </table></div>
  </section>`;
}

function Happened({ view, nowMs }) {
  return html`<section aria-label="What happened last">
    <h2>What happened last</h2>
    ${view.happened.length === 0 && html`<p class="quiet">Nothing since the server started, ${clock(view.startedAt, nowMs)}.</p>`}
    <ol class="happened" tabindex="0">${view.happened.map((event) => html`<li
      key=${[event.at, event.kind, event.lease_id, ...event.gpus.map((gpu) => gpu.uuid)].join(" ")}>
      <time datetime=${Number.isFinite(event.at) ? new Date(event.at).toISOString() : null}>${clock(event.at, nowMs)}</time>
      <span><${Text} parts=${sentence(event, view.isFleet)} /> <bdi class="quiet">${runs(event)}</bdi></span>
    </li>`)}</ol>
  </section>`;
}

/** An event as a sentence. */
export function sentence(event, isFleet) {
  const gpus = name(gpuNames(event.gpus, isFleet));
  const who = name(holderName(event));
  switch (event.kind) {
    case "queued":
      return say`${who} waits`;
    case "granted":
      return say`${who} has ${gpus}`;
    case "warned":
      return event.reason === null ? say`${who} may keep ${gpus}: the warning is withdrawn` : say`${who} is about to lose ${gpus}: ${WARNINGS[event.reason] ?? event.reason}`;
    case "ended":
      return event.gpus.length === 0 ? say`${who} no longer waits: ${endOf(event)}` : say`${who} no longer has ${gpus}: ${endOf(event)}`;
    case "drained":
      return say`${gpus} is free of the processes of ${who}`;
    case "out_of_service":
      return say`${gpus} out of service: ${name(event.reason ?? "no reason given")}`;
    case "in_service":
      return say`${gpus} back in service`;
    default:
      return say`${event.kind} ${gpus}`;
  }
}

/** How a lease ended, by whom and why, as far as it is known. */
function endOf(event) {
  const how = event.by ? say`${event.reason} by ${name(event.by)}` : [END_REASONS[event.reason] ?? event.reason];
  return event.note ? [...how, ": ", name(event.note)] : how;
}
