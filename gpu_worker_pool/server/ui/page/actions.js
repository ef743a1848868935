// What the user may do with a token. The token is kept in this object only.

import { ask } from "./ask.js";
import { attribute, byId, el, show, text } from "./dom.js";
import { nowMs } from "./now.js";
import { duration, END_REASONS, gpuNames, gpuOfBox, holderName, memory } from "./words.js";

export class Access {
  #token = null;
  #name = null;
  #isOperator = false;
  #onChange;

  constructor(onChange) {
    this.#onChange = onChange;
  }

  get name() {
    return this.#name;
  }

  get isOperator() {
    return this.#isOperator;
  }

  /** An owner may end its own leases, an operator all. The server decides; this only hides useless buttons. */
  mayRelease(lease) {
    return this.#token !== null && (this.#isOperator || lease.owner === this.#name);
  }

  /** The name that a token proves. */
  identify(token) {
    return ask("ui/data/me", { token });
  }

  accept(token, { name, role }) {
    this.#token = token;
    this.#name = name;
    this.#isOperator = role !== "user";
    this.#onChange();
  }

  forget() {
    this.#token = null;
    this.#name = null;
    this.#isOperator = false;
    this.#onChange();
  }

  async ask(path, options) {
    try {
      return await ask(path, { ...options, token: this.#token });
    } catch (error) {
      if (error.status === 401) this.forget(); // it is no longer valid
      throw error;
    }
  }
}

export class TokenDialog {
  #access;
  #attempt = 0;

  constructor(access) {
    this.#access = access;
    const dialog = byId("token-dialog");
    byId("open-token").addEventListener("click", () => {
      text(byId("token-error"), "");
      show(byId("token-plain"), location.protocol === "http:" && !isThisMachine(location.hostname));
      dialog.showModal();
      byId("token").focus();
    });
    byId("forget-token").addEventListener("click", () => {
      access.forget();
      byId("open-token").focus();
    });
    dialog.querySelector(".cancel").addEventListener("click", () => dialog.close());
    // However it is closed, the text is cleared, and a call under way is ignored.
    dialog.addEventListener("close", () => {
      byId("token").value = "";
      this.#attempt += 1;
    });
    byId("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit(dialog);
    });
  }

  /** Draw the header's part of it. */
  draw(hasTokens) {
    const { name } = this.#access;
    show(byId("token-none"), !hasTokens);
    show(byId("signed-in"), name !== null);
    show(byId("forget-token"), name !== null);
    show(byId("open-token"), name === null);
    text(byId("token-name"), name ?? "");
  }

  async #submit(dialog) {
    const token = byId("token").value.trim();
    text(byId("token-error"), "");
    // A header cannot carry other characters, and the browser's own error would not say so.
    if (!/^[!-~]+$/.test(token)) {
      text(byId("token-error"), "The token must be visible ASCII characters only, without blanks.");
      return;
    }
    const attempt = (this.#attempt += 1);
    try {
      const me = await this.#access.identify(token);
      if (attempt !== this.#attempt) return;
      dialog.close();
      this.#access.accept(token, me);
      byId("forget-token").focus();
    } catch (error) {
      if (attempt === this.#attempt) text(byId("token-error"), error.message);
    }
  }
}

const isThisMachine = (host) => /^(localhost|.*\.localhost|\[::1\]|127(\.[0-9]+){3})$/.test(host);

/** Actions that change something. Each asks for confirmation and says what will happen. */
export class Actions {
  /** The start of the paths: in a fleet the calls are those of the whole fleet. */
  scope = "";
  #access;
  #onDone;
  #dialog = byId("confirm-dialog");
  #planned = null;

  constructor(access, onDone) {
    this.#access = access;
    this.#onDone = onDone;
    this.#dialog.querySelector(".cancel").addEventListener("click", () => this.#dialog.close());
    this.#dialog.addEventListener("close", () => (this.#planned = null));
    byId("confirm-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#perform();
    });
  }

  release(lease, pool) {
    const who = holderName(lease);
    const path = `${this.scope}leases/${encodeURIComponent(lease.id)}`;
    if (lease.state === "queued") {
      this.#confirm({
        title: `Take ${who} out of the queue?`,
        lines: [`The request ${lease.id} of ${who}, at position ${lease.position ?? "unknown"}, is cancelled.`, "The waiter learns that its request ended. A new request starts at the end of the queue."],
        yes: "Take out",
        done: (answer) => (answer.end_reason === "cancelled" ? `${who} is out of the queue.` : ended(lease, answer, "cancelled", "cancelled")),
        call: () => this.#access.ask(path, { method: "DELETE" }),
      });
      return;
    }
    this.#confirm({
      title: `Release ${gpuNames(lease.gpus)} of ${who}?`,
      lines: [`The lease ${lease.id} of ${who} ends as if ${who} had released it.`, ...consequences(lease, pool)],
      yes: "Release",
      done: (answer) => ended(lease, answer, "released", "released"),
      call: () => this.#access.ask(path, { method: "DELETE" }),
    });
  }

  revoke(lease, pool) {
    const who = holderName(lease);
    this.#confirm({
      title: `Revoke the lease of ${who} on ${gpuNames(lease.gpus)}?`,
      lines: [`The lease ${lease.id} is revoked, and ${who} learns of it.`, ...consequences(lease, pool)],
      yes: "Revoke",
      done: (answer) => ended(lease, answer, "revoked", "revoked"),
      call: () => this.#access.ask(`${this.scope}admin/leases/${encodeURIComponent(lease.id)}/revoke`, { method: "POST" }),
    });
  }

  drain(gpu, pool) {
    const holders = gpu.leases.map((id) => pool.leases.get(id)).filter((lease) => lease?.state === "active");
    const held = holders.length ? `${holders.map(holderName).join(", ")} may keep it until the lease ends.` : "It has no holder now.";
    this.#confirm({
      title: `Take ${gpuOfBox(gpu)} out of service?`,
      lines: [`${gpuOfBox(gpu)} (${gpu.name ?? gpu.uuid}) is not granted until it is put back, also after a restart of the server.`, held],
      yes: "Drain",
      reason: true,
      done: () => `${gpuOfBox(gpu)} is out of service.`,
      call: (reason) => this.#access.ask(this.#gpuPath(gpu, "drain"), { method: "POST", body: { reason } }),
    });
  }

  undrain(gpu) {
    this.#confirm({
      title: `Put ${gpuOfBox(gpu)} back into service?`,
      lines: [`${gpuOfBox(gpu)} (${gpu.name ?? gpu.uuid}) is granted to the next waiter as soon as its readings allow.`],
      yes: "Put back",
      done: () => `${gpuOfBox(gpu)} is back in service.`,
      call: () => this.#access.ask(this.#gpuPath(gpu, "undrain"), { method: "POST" }),
    });
  }

  cancelDrain(gpu) {
    this.#confirm({
      title: `Cancel the planned drain of ${gpuOfBox(gpu)}?`,
      lines: [`${gpuOfBox(gpu)} (${gpu.name ?? gpu.uuid}) stays in service.`],
      yes: "Cancel the drain",
      done: () => `No drain of ${gpuOfBox(gpu)} is planned.`,
      call: () => this.#access.ask(this.#gpuPath(gpu, "undrain"), { method: "POST" }),
    });
  }

  #gpuPath(gpu, verb) {
    const name = this.scope === "" ? gpu.uuid : `${gpu.node}:${gpu.uuid}`;
    return `${this.scope}admin/gpus/${encodeURIComponent(name)}/${verb}`;
  }

  #confirm(planned) {
    this.#planned = planned;
    text(byId("confirm-title"), planned.title);
    byId("confirm-text").replaceChildren(...planned.lines.map((line) => el("li", {}, line)));
    text(byId("confirm-yes"), planned.yes);
    text(byId("confirm-error"), "");
    show(byId("confirm-reason-label"), planned.reason === true);
    byId("confirm-reason").value = "";
    attribute(byId("confirm-yes"), "disabled", null);
    this.#dialog.showModal();
    // The focus is not on the main button: Enter must not confirm a mistake.
    (planned.reason ? byId("confirm-reason") : this.#dialog.querySelector(".cancel")).focus({ preventScroll: true });
    this.#dialog.scrollTop = 0;
  }

  async #perform() {
    const planned = this.#planned;
    // When the answer comes, the dialog may be closed, or show another action.
    const isShown = () => this.#planned === planned;
    text(byId("confirm-error"), "");
    attribute(byId("confirm-yes"), "disabled", "");
    try {
      const answer = await planned.call(byId("confirm-reason").value.trim());
      if (isShown()) this.#dialog.close();
      this.#onDone("good", planned.done(answer));
    } catch (error) {
      if (isShown()) text(byId("confirm-error"), error.message);
      else this.#onDone("bad", `${planned.title} ${error.message}`);
    } finally {
      if (isShown()) attribute(byId("confirm-yes"), "disabled", null);
    }
  }
}

/** The outcome for a lease that was to end for this reason; it may have ended for another reason just before. */
function ended(lease, answer, reason, words) {
  const who = holderName(lease);
  return answer.end_reason === reason ? `The lease ${lease.id} of ${who} is ${words}.` : `The lease ${lease.id} of ${who} had ended already: ${END_REASONS[answer.end_reason] ?? answer.end_reason}.`;
}

function consequences(lease, pool) {
  const held = Number.isFinite(lease.granted_at) ? `It was held for ${duration((nowMs() - lease.granted_at) / 1000)}.` : null;
  const used = lease.gpus
    .map((held) => pool.gpus.find((gpu) => gpu.uuid === held.uuid))
    .filter((gpu) => gpu !== undefined && gpu.used_mb !== null)
    .map((gpu) => `${gpuOfBox(gpu)} has ${memory(gpu.used_mb)} in use`);
  const next = pool.queue[0];
  return [
    held,
    "gpu-pool run ends its command at once. Any other holder learns of it with its next heartbeat; the server does not stop its program.",
    used.length ? `${used.join(", ")}; the GPU drains while that memory is in use.` : null,
    next ? `Next in the queue: ${holderName(next)}${next.priority ? `, priority ${next.priority}` : ""}.` : "Nobody waits.",
  ].filter((line) => line !== null);
}
