// What is the user's own: the leases of the owner that the token proves, else of the name that the user has typed.

import { byId, text } from "./dom.js";
import { remember, remembered } from "./remembered.js";

const NAME = "owner";

export class Mine {
  #access;
  #typed = remembered(NAME);
  #dialog = byId("me-dialog");

  constructor(access, onChange) {
    this.#access = access;
    byId("open-me").addEventListener("click", () => {
      byId("me").value = this.name ?? "";
      this.#dialog.showModal();
      byId("me").select();
    });
    this.#dialog.querySelector(".cancel").addEventListener("click", () => this.#dialog.close());
    byId("me-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const name = byId("me").value.trim();
      this.#typed = name === "" ? null : name;
      remember(NAME, this.#typed);
      this.#dialog.close();
      onChange();
    });
  }

  /** The owner's name; null if it is not known. admin is not an owner. */
  get name() {
    return this.#proven ?? this.#typed;
  }

  get #proven() {
    return this.#access.name === "admin" ? null : this.#access.name;
  }

  owns(lease) {
    return this.name !== null && lease.owner === this.name;
  }

  draw() {
    text(byId("open-me"), this.name === null ? "Which are mine?" : "Change");
    byId("open-me").hidden = this.#proven !== null;
  }
}
