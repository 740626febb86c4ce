// The service's status: the model's line at the top, the requests before the first run, and the key, if the service
// needs one.

import { ask, model } from "./request/completion.js";
import { authorization, useKey } from "./request/key.js";
import { parameters } from "./request/schema.js";

export class Service {
  #places;
  #view;

  /** What GET /v1/models says of the model; empty until it has said it. */
  facts = {};

  /**
   * `places`: the elements { model, weights, form, key }. `view` is told: known(facts), described(parameters, facts)
   * what a request may have, keyed() a key was typed, and refused(sentence).
   */
  constructor(places, view) {
    [this.#places, this.#view] = [places, view];
    places.form.addEventListener("submit", (event) => this.#typed(event));
  }

  async introduce() {
    try {
      this.facts = await model();
      this.show(this.facts.id, this.facts.weights_version);
      this.#view.known(this.facts);
      this.#view.described(parameters(await ask("openapi.json"), { encoder: this.facts.has_encoder }), this.facts);
    } catch (error) {
      // While the weights load the server says how long; otherwise the first run tells the model, or what is wrong.
      this.failed(error);
      if (error.status === 401 && "Authorization" in authorization()) this.#wrong(error.message);
      if (error.retryAfter) setTimeout(() => this.introduce(), error.retryAfter * 1000);
    }
  }

  show(name, version) {
    const { model: place, weights } = this.#places;
    place.textContent = name ?? "";
    weights.textContent = version ? `weights ${version.replace(/^sha256:/, "").slice(0, 8)}` : "";
    weights.title = version ?? "";
  }

  /** Any request failed: where it is for want of a key, asks for one. */
  failed(error) {
    if (error.status === 401) this.#places.form.hidden = false;
  }

  #wrong(sentence) {
    this.#view.refused(sentence);
    this.#places.key.focus();
  }

  #typed(event) {
    event.preventDefault();
    const { form, key } = this.#places;
    if (!useKey(key.value)) return this.#view.refused("A key is one word of letters, digits and signs.");
    key.value = "";
    form.hidden = true;
    this.#view.keyed();
    this.introduce();
  }
}
