// The API page: one section for every route of openapi.json, and one for every object in it. All content comes from
// that document, and all text is set through textContent.

import { fillParameters, tryIt } from "./docs-try.js";
import { classed, element, put } from "./elements.js";
import { applyPreferences } from "./preferences.js";

const MODEL_DEFAULT = "the model's, else ";
const $ = (id) => document.getElementById(id);

applyPreferences();
$("key-form").addEventListener("submit", (event) => event.preventDefault());
try {
  const response = await fetch("openapi.json", { cache: "no-cache" });
  if (!response.ok) throw new Error(`openapi.json cannot be read: status ${response.status}`);
  show(await response.json(), await modelFacts());
} catch (error) {
  $("trouble").textContent = error.message;
  $("trouble").hidden = false;
}

// The model's entry in GET /v1/models, or nothing while the model loads.
async function modelFacts() {
  try {
    return (await (await fetch("v1/models", { cache: "no-store" })).json()).data[0];
  } catch {
    return {};
  }
}

function show(api, facts) {
  prose($("about"), `${api.info.description} Version ${api.info.version}.`);
  withModelDefaults(api.components.schemas, facts.sampling_defaults ?? {});
  for (const tag of api.tags) section(api, tag);
  fillParameters({ model_id: facts.id });
  for (const [name, schema] of Object.entries(api.components.schemas)) {
    const summary = element("summary", element("code", name), " ", prose(element("span"), schema.description));
    const object = element("details", summary, fields(schema));
    object.id = name;
    $("schemas").append(object);
  }
  $("schemas").hidden = false;
  openTarget();
  addEventListener("hashchange", openTarget);
}

// Defaults of POST /complete that the weights may set; other routes use neutral ones.
function withModelDefaults({ CompleteRequest: native, CompletionsRequest: neutral }, defaults) {
  for (const [name, field] of Object.entries(native.properties)) {
    if (field.default !== undefined || neutral.properties[name]?.default === undefined) continue;
    const value = JSON.stringify(defaults[name] ?? neutral.properties[name].default);
    field.defaultWords = name in defaults ? `${value} (the model's)` : MODEL_DEFAULT + value;
  }
}

function section(api, { name, description }) {
  const list = element("ul");
  put($("contents"), element("h2", name), list);
  const block = classed("section", "routes", element("h2", name), element("p", description));
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      if (operation.tags?.[0] !== name) continue;
      block.append(route(api, method, path, operation));
      list.append(element("li", link(operation.operationId, title(method, path))));
    }
  }
  $("routes").append(block);
}

function title(method, path) {
  return element("span", element("b", method.toUpperCase()), " ", element("code", path));
}

function route(api, method, path, operation) {
  const content = operation.requestBody?.content["application/json"];
  const schema = content && resolve(api, content.schema);
  const [first, ...rest] = operation.description.split(/(?<=\.)\s/);
  const summary = element("summary", title(method, path), " ", prose(element("small"), first));
  const node = classed("details", "route", summary);
  node.id = operation.operationId;
  if (rest.length) node.append(prose(element("p"), rest.join(" ")));
  node.append(tryIt(method, path, operation, content?.examples ?? {}));
  if (schema) put(node, element("h3", "Fields"), fields(schema));
  return put(node, element("h3", "Responses"), ...responses(operation.responses));
}

// Required fields first. Each has its name, whether it is required or what its absence means, its type and its meaning.
function fields(schema) {
  const required = new Set(schema.required);
  const all = Object.entries(schema.properties ?? {});
  const sorted = [...all.filter(([name]) => required.has(name)), ...all.filter(([name]) => !required.has(name))];
  const entries = sorted.map(([name, field]) => {
    const term = element("dt", element("code", name), " ");
    if (required.has(name)) put(term, classed("small", "required", "required"), " ", type(field));
    else put(term, type(field), defaultOf(field));
    return element("div", term, prose(element("dd"), field.description ?? ""));
  });
  return classed("dl", "fields", ...entries);
}

function defaultOf({ default: value, defaultWords }) {
  if (value === undefined && !defaultWords) return "";
  return classed("small", "default", "default ", element("code", defaultWords ?? JSON.stringify(value)));
}

// Successful responses in full, and all errors, which share one schema, on one line.
function responses(all) {
  const list = (entries) => classed("dl", "fields", ...entries.map((entry) => response(...entry)));
  const isError = ([status]) => Number(status) >= 400;
  const [errors, good] = [Object.entries(all).filter(isError), Object.entries(all).filter((entry) => !isError(entry))];
  if (!errors.length) return [list(good)];
  const summary = element("summary", `Errors: ${errors.map(([status]) => status).join(", ")}`);
  return [list(good), classed("details", "errors", summary, list(errors))];
}

function response(status, { description, content = {} }) {
  const term = element("dt", element("code", status));
  for (const [kind, media] of Object.entries(content)) {
    const events = kind === "text/event-stream" ? media.schema.anyOf : [];
    put(term, " ", element("small", kind), " ", events.length ? "" : type(media.schema ?? {}));
    for (const { properties } of events) {
      const data = properties.data.contentSchema ?? properties.data;
      put(term, element("br"), `${properties.event?.const ?? "data"}: `, type(data));
    }
  }
  return element("div", term, prose(element("dd"), description));
}

// A type in words, with its limits; a reference is a link to its object.
function type(schema) {
  const node = classed("span", "type");
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return put(node, link(name, element("code", name)));
  }
  if (schema.anyOf) {
    const kinds = schema.anyOf.filter((kind) => kind.type !== "null");
    kinds.forEach((kind, i) => put(node, i ? " or " : "", type(kind)));
    return node;
  }
  if (schema.type === "array") return put(node, "[", type(schema.items ?? {}), "]", limit(schema.maxItems, " up to "));
  put(node, schema.const === undefined ? (schema.type ?? "any") : JSON.stringify(schema.const));
  const from = schema.minimum ?? (schema.exclusiveMinimum === undefined ? undefined : `above ${schema.exclusiveMinimum}`);
  const to = schema.maximum ?? (schema.exclusiveMaximum === undefined ? undefined : `below ${schema.exclusiveMaximum}`);
  return put(node, limit(from, ", from "), limit(to, from === undefined ? ", to " : " to "), limit(schema.maxLength, ", up to "));
}

// Limits above a million come from number formats.
function limit(value, before) {
  return value === undefined || parseFloat(String(value).replace(/^\D+/, "")) > 1e6 ? "" : `${before}${value}`;
}

function link(id, ...content) {
  const anchor = element("a", ...content);
  anchor.href = `#${id}`;
  return anchor;
}

function resolve(api, schema) {
  return schema.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema;
}

// `code` between backticks, and lines as they are.
function prose(node, text = "") {
  text.split(/`([^`]+)`/).forEach((part, i) => node.append(i % 2 ? element("code", part) : part));
  node.classList.add("prose");
  return node;
}

// Expands the route that a link refers to, or the first one.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const opened = target ?? document.querySelector(".route");
  if (opened instanceof HTMLDetailsElement) opened.open = true;
  target?.scrollIntoView();
}
