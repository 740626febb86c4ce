// The service's status: the model's line at the top, the requests before the first run, and the key, if the service
// needs one.

import { ask, model } from "./request/completion.js";
import { authorization, useKey } from "./request/key.js";
import { parameters } from "./request/schema.js";

export class Service {
  #elements;
  #view;

  /** The model's entry in GET /v1/models; empty until the response arrives. */
  facts = {};

  /**
   * `elements`: { model, weights, form, key }. `view` receives known(facts), described(parameters, facts)
   * the request's parameters, unknown(error) neither could be read, keyed() a key was entered, and refused(sentence).
   */
  constructor(elements, view) {
    [this.#elements, this.#view] = [elements, view];
    elements.form.addEventListener("submit", (event) => this.#typed(event));
  }

  async introduce() {
    try {
      this.facts = await model();
      this.show(this.facts.id, this.facts.weights_version);
      this.#view.known(this.facts);
      this.#view.described(parameters(await ask("openapi.json"), { encoder: this.facts.has_encoder }), this.facts);
    } catch (error) {
      // While the weights load the server says how long; otherwise the first run shows the model or the error.
      this.failed(error);
      this.#view.unknown(error);
      if (error.status === 401 && "Authorization" in authorization()) this.#wrong(error.message);
      if (error.retryAfter) setTimeout(() => this.introduce(), error.retryAfter * 1000);
    }
  }

  show(name, version) {
    const { model: modelLine, weights } = this.#elements;
    modelLine.textContent = name ?? "";
    weights.textContent = version ? `weights ${version.replace(/^sha256:/, "").slice(0, 8)}` : "";
    weights.title = version ?? "";
  }

  /** Handles a failed request: shows the key form if the request needs a key. */
  failed(error) {
    if (error.status === 401) this.#elements.form.hidden = false;
  }

  #wrong(sentence) {
    this.#view.refused(sentence);
    this.#elements.key.focus();
  }

  #typed(event) {
    event.preventDefault();
    const { form, key } = this.#elements;
    if (!useKey(key.value)) return this.#view.refused("A key is one word of letters, digits and signs.");
    key.value = "";
    form.hidden = true;
    this.#view.keyed();
    this.introduce();
  }
}
