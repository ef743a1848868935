// People: who waits, and who holds what.

import { leasesOf, leftWords, mayManage, queueOf } from "./facts.js";
import { Clamped, EndButton, Owner } from "./parts.js";
import { html, useState } from "./vendor/preact.js";
import { duration, gpuNames, holderName, NONE, percent, plain, runs, start } from "./words.js";

// This many rows are shown until the user asks for all: the timeline below must stay in sight.
const FEW = 12;

/** The waiters in order: what all wait for once, and of each what differs. */
export function Queue({ page }) {
  const { view, owner, nowMs, me, isConnected, open } = page;
  const { pool } = view;
  const [isWhole, setWhole] = useState(false);
  const [opened, setOpened] = useState(null);
  const { shared, rows } = queueOf(pool);
  const isMine = (row) => owner !== null && row.lease.owner === owner;
  const shown = rows.filter((row, i) => isWhole || i < FEW || isMine(row));
  const hidden = rows.length - shown.length;
  return html`<section class="queue" id="queue" tabindex="-1" aria-label="Queue">
    <div class="head"><h2>Queue <span class="count">${pool.queueLength || ""}</span></h2>
      ${pool.queueLength === 0 && html`<p class="quiet">Nobody waits.</p>`}
      ${shared !== "" && html`<p class="quiet clamped" title=${shared}>${rows.every((row) => row.why === "") ? "All" : "Most"} wait for: <bdi>${shared}</bdi></p>`}
      ${hidden > 0 && html`<button type="button" class="link" onClick=${() => setWhole(true)}>Show all ${pool.queueLength}</button>`}</div>
    <ol class="waiters" data-many=${shown.length > 4 || null}>
      ${shown.map((row) => {
        const { lease, leases } = row;
        const isOpen = opened === lease.id;
        const times = leases.length > 1 ? ` ×${leases.length}` : "";
        const mayLeave = isConnected && mayManage(me, lease);
        return html`<li key=${lease.id} data-mine=${isMine(row) || null}>
          <button type="button" class="number-of" aria-expanded=${String(isOpen)}
            aria-label=${plain([`Position ${lease.position ?? "unknown"}, `, { name: holderName(lease) }, ": why it waits"])}
            onClick=${() => setOpened(isOpen ? null : lease.id)}>${lease.position ?? "?"}</button>
          <${Owner} lease=${lease} isMine=${isMine(row)} />
          <${Clamped} text=${`${row.runs}${times}`} />
          <span class="wants clamped" title=${[row.wants, row.why].filter(Boolean).join(" · ")}>${row.wants}${row.why !== "" && html` <bdi
            class="quiet">${row.why}</bdi>`}</span>
          <span class="number quiet waits" title=${`waits ${duration((nowMs - lease.requested_at) / 1000)}`}>${duration((nowMs - lease.requested_at) / 1000)}</span>
          <span class="number starts"
            title=${startTitle(lease, nowMs)}>${Number.isFinite(lease.start.at) ? start(lease.start.at, lease.start.basis, nowMs) : NONE}</span>
          ${mayLeave ? html`<button type="button" class="leave" title="Take out of the queue"
            aria-label=${plain(["Take out of the queue: ", { name: holderName(lease) }])}
            onClick=${() => open({ kind: "leave", leases })}>✕</button>` : html`<span></span>`}
          ${isOpen && html`<p class="why quiet"><bdi>${lease.reason ?? "The reason is not known."}</bdi></p>`}
        </li>`;
      })}
    </ol>
  </section>`;
}

function startTitle({ start: { at, basis, after } }, nowMs) {
  if (!Number.isFinite(at)) return "start not known";
  if (at <= nowMs) return "starts any moment now";
  if (basis !== "declared") return "judging by earlier jobs";
  return after === null ? "by declared time limits" : `if ${after.split(" (")[0]}'s job ends when it said`;
}

/** A row for each lease that holds GPUs. */
export function Leases({ page, gpus }) {
  const { view, nowMs, owner } = page;
  const rows = leasesOf(view, gpus);
  return html`<table class="rows leases" aria-label="Leases">
    <thead><tr><th scope="col">holder</th><th scope="col">runs</th><th scope="col">GPUs</th><th scope="col" class="number wide">utilization</th><th scope="col"
      class="number wide">since</th><th scope="col" class="number">left</th><th scope="col"><span class="hidden">actions</span></th></tr></thead>
    <tbody>${rows.map(({ lease, utilization }) => html`<tr key=${lease.id} data-mine=${(owner !== null && lease.owner === owner) || null}>
      <th scope="row"><${Owner} lease=${lease} isMine=${owner !== null && lease.owner === owner} /></th>
      <td><${Clamped} text=${runs(lease)} /></td>
      <td><${Clamped} text=${gpuNames(lease.gpus, view.isFleet)} /></td>
      <td class="number wide">${percent(utilization)}${lease.idle_s !== null && html` <span class="badge"
        data-kind="blocked">idle ${duration(lease.idle_s)}</span>`}</td>
      <td class="number wide">${duration((nowMs - lease.granted_at) / 1000)}</td>
      <td class="number">${lease.state === "active" ? leftWords(lease, view, nowMs) : lease.state}</td>
      <td class="do"><${EndButton} lease=${lease} page=${page} /></td>
    </tr>`)}</tbody>
  </table>`;
}
