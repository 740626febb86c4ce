// The service's status: the model's line at the top, the requests before the first run, and the key, if the service
// needs one.

import { ask, authorization, model, useKey } from "./request/completion.js";
import { parameters } from "./request/request-parameters.js";

export class Service {
  #elements;
  #page;
  #isConnecting = true; // the status line shows "connecting", or why the model's facts could not be read

  /** The model's entry in GET /v1/models; empty until the response arrives. */
  facts = {};

  /**
   * `elements`: { model, weights, form, key }. `page`: { status (status.js), onmodel(facts), onparameters(parameters,
   * facts) the request's parameters, onkey() a key was entered }.
   */
  constructor(elements, page) {
    [this.#elements, this.#page] = [elements, page];
    elements.form.addEventListener("submit", (event) => this.#typed(event));
  }

  async introduce() {
    const description = ask("openapi.json"); // at once: on a slow line a round trip is half a second
    description.catch(() => {}); // an error of model() comes first
    try {
      this.facts = await model();
      this.#describe();
      if (this.#isConnecting) this.#page.status.show("idle", "Ready");
      this.#isConnecting = false;
      this.#page.onmodel(this.facts);
      this.#page.onparameters(parameters(await description, { encoder: this.facts.has_encoder }), this.facts);
    } catch (error) {
      // While the weights load the server says how long; otherwise the first run shows the model or the error.
      this.failed(error);
      this.#report(error);
      if (error.status === 401 && "Authorization" in authorization()) this.#wrong(error.message);
      if (error.retryAfter) setTimeout(() => this.introduce(), error.retryAfter * 1000);
    }
  }

  /** These weights answered a run. Reads the model's facts again if they are not those known to the page. */
  show(name, version) {
    if (!version || (version === this.facts.weights_version && name === this.facts.id)) return;
    this.facts = { ...this.facts, id: name, weights_version: version, n_params: null, max_model_len: null };
    this.#describe();
    this.introduce();
  }

  #describe() {
    const { model: modelLine, weights } = this.#elements;
    const { id, weights_version: version, n_params: parameters, max_model_len: context } = this.facts;
    const facts = [parameters && `${size(parameters)} parameters`, context && `context ${context.toLocaleString("en")}`];
    modelLine.textContent = id ?? "";
    weights.textContent = facts.filter(Boolean).join(", ");
    for (const node of [modelLine, weights]) node.title = version ?? "";
  }

  /** Handles a failed request: shows the key form if the request needs a key. */
  failed(error) {
    if (error.status === 401) this.#elements.form.hidden = false;
  }

  /** A run began, which takes over the status line. */
  began() {
    this.#isConnecting = false;
  }

  // The page stays usable: the next run shows whether the service is back.
  #report(error) {
    const { status } = this.#page;
    this.#isConnecting = true;
    if (error.retryAfter) status.waits({ seconds: error.retryAfter, message: error.message });
    else if (error.status === 401) status.show("idle", "Enter the key of this service.");
    else status.failed(error.message);
  }

  #wrong(sentence) {
    this.#page.status.failed(sentence);
    this.#elements.key.focus();
  }

  #typed(event) {
    event.preventDefault();
    const { form, key } = this.#elements;
    if (!useKey(key.value)) return this.#page.status.failed("A key is one word of letters, digits and signs.");
    key.value = "";
    form.hidden = true;
    this.#page.status.show("idle", "Connecting");
    this.#page.onkey();
    this.introduce();
  }
}

// "8.7 M", "1.2 B".
function size(count) {
  const [value, unit] = count < 1e9 ? [count / 1e6, "M"] : [count / 1e9, "B"];
  return `${value.toFixed(value < 99.5 ? 1 : 0)}\u00a0${unit}`;
}
