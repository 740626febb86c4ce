// The fields of the request that the user may set: what is typed into them, in the user's own characters.
// Knows nothing of what they mean or which values are allowed: the server judges, and says why.

export class Settings {
  #fields;

  /** `fields` maps the name of a request field to its input element. */
  constructor(fields) {
    this.#fields = fields;
  }

  /** { name: text }; an empty text stands for the model's default. */
  get typed() {
    return Object.fromEntries(Object.entries(this.#fields).map(([name, field]) => [name, field.value.trim()]));
  }

  fill(typed) {
    for (const [name, field] of Object.entries(this.#fields)) field.value = typed[name] ?? field.value;
  }

  focus(name) {
    this.#fields[name].focus();
  }

  /** Show in every field that is left empty what the server puts in its place. */
  explain(typed, resolved) {
    for (const [name, field] of Object.entries(this.#fields)) {
      if (typed[name] === "" && resolved[name] != null) field.placeholder = resolved[name];
    }
  }
}
