// The parameters of POST /complete with their kinds and limits, from the server's GET /openapi.json. Fields that this page
// does not know get a control by their type. Pure functions.

const PATH = "/complete";
const MAIN = ["temperature", "top_p", "top_k", "max_tokens", "seed", "n"];
// Fields that the page sets itself, or that make no sense on it.
const LEFT_OUT = ["prompt", "stream", "echo", "user", "request_id", "logprobs", "return_token_ids", "resume", "truncate_prompt_tokens"];
const WORDS = { json: "JSON", eos: "EOS" };
const LABELS = { n: "Continuations" };
// Useful ranges of sliders, narrower than what is allowed.
const SWEEPS = {
  temperature: { min: 0, max: 2, step: 0.05 },
  top_k: { min: 0, max: 100, step: 1 },
  max_tokens: { min: 0, max: 512, step: 8 },
  repetition_penalty: { min: 0.5, max: 2, step: 0.05 },
};

// Types of main fields, for before the server's description has arrived.
const KNOWN = {
  temperature: { type: "number" },
  top_p: { type: "number", minimum: 0, maximum: 1 },
  n: { type: "integer", minimum: 1, maximum: 4 },
};

/** The main parameters for before the server's description has arrived, in the same order. */
export const FIRST = MAIN.map((name) => parameter(name, KNOWN[name] ?? { type: "integer" }, {}));

/**
 * A list of { name, label, help, kind, group, sweep, minimum, maximum, above, below, minLength, maxLength, maxItems,
 * choices, example }: the main group first, then the others in the server's order; without limits that do not exist.
 *
 * `kind` is integer, number, boolean, text, texts, integers or json; `group` main or more; `sweep` the { min, max,
 * step } of a slider, or null. `above` and `below` are exclusive limits.
 */
export function parameters(openapi, { encoder = false } = {}) {
  const { content } = openapi.paths[PATH].post.requestBody;
  const properties = Object.entries(resolved(content["application/json"].schema, openapi).properties);
  const fields = properties.filter(([name]) => !LEFT_OUT.includes(name) && (encoder || name !== "source"));
  const all = fields.map(([name, schema]) => parameter(name, schema, openapi));
  return all.sort((a, b) => place(a, all) - place(b, all));
}

// The sort key of a parameter; include_stop follows stop.
function place({ name }, all) {
  const main = MAIN.indexOf(name);
  if (main >= 0) return main;
  const near = name === "include_stop" ? all.findIndex((other) => other.name === "stop") + 0.5 : 0;
  return MAIN.length + (near || all.findIndex((other) => other.name === name));
}

function parameter(name, schema, openapi) {
  const shapes = alternatives(schema, openapi);
  const kind = kindOf(shapes.map(typeOf));
  const limits = limitsOf(kind, shapes);
  return {
    name,
    label: LABELS[name] ?? labelOf(name),
    help: schema.description ?? "",
    kind,
    group: MAIN.includes(name) ? "main" : "more",
    sweep: sweepOf(name, kind, limits),
    ...(schema.examples ? { example: JSON.stringify(schema.examples[0]) } : {}),
    ...limits,
  };
}

function resolved(schema, openapi) {
  const path = schema.$ref?.split("/").slice(1) ?? [];
  return path.length ? path.reduce((node, step) => node[step], openapi) : schema;
}

// The schemas of a field's alternatives without null, which leaving the field out means.
function alternatives(schema, openapi) {
  const found = resolved(schema, openapi);
  const several = found.anyOf ?? found.oneOf;
  if (several) return several.flatMap((one) => alternatives(one, openapi));
  if (Array.isArray(found.type)) return found.type.flatMap((type) => alternatives({ ...found, type }, openapi));
  return found.type === "null" ? [] : [found];
}

function typeOf({ type, items }) {
  return type === "array" ? `${items?.type}s` : type;
}

function kindOf(types) {
  const only = (...allowed) => types.length > 0 && types.every((type) => allowed.includes(type));
  if (only("integer")) return "integer";
  if (only("integer", "number")) return "number";
  if (only("boolean")) return "boolean";
  if (only("integers")) return "integers";
  if (only("string", "integers")) return "text"; // token ids are for programs
  if (only("string", "strings")) return "texts";
  return "json";
}

function limitsOf(kind, shapes) {
  const isList = kind === "texts" || kind === "integers";
  const list = isList ? shapes.find((shape) => shape.type === "array") : null;
  const one = list?.items ?? shapes.find((shape) => shape.type !== "array") ?? {};
  const limits = {
    minimum: one.minimum,
    maximum: one.maximum,
    above: one.exclusiveMinimum,
    below: one.exclusiveMaximum,
    minLength: one.minLength,
    maxLength: one.maxLength,
    maxItems: list?.maxItems,
    choices: one.enum,
  };
  return Object.fromEntries(Object.entries(limits).filter(([, value]) => value !== undefined));
}

function sweepOf(name, kind, { minimum, maximum, above, below }) {
  if (kind !== "number" && kind !== "integer") return null;
  if (SWEEPS[name]) return SWEEPS[name];
  const [min, max] = [minimum ?? above, maximum ?? below];
  if (!Number.isFinite(min) || !Number.isFinite(max) || max - min > 1000) return null;
  if (kind === "number") return { min, max, step: max - min > 4 ? 0.1 : 0.01 };
  return { min: minimum ?? above + 1, max: maximum ?? below - 1, step: 1 };
}

function labelOf(name) {
  const text = name.split("_").map((word) => WORDS[word] ?? word).join(" ");
  return text[0].toUpperCase() + text.slice(1);
}
