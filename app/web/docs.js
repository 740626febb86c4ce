// The API page: one section for every route of openapi.json, one table for every object in it. All content comes from
// that document, and all text is set through textContent.

import { element, put } from "./elements.js";
import { tryIt } from "./docs-try.js";

try {
  const response = await fetch("openapi.json", { cache: "no-cache" });
  if (!response.ok) throw new Error(`openapi.json cannot be had: status ${response.status}`);
  show(await response.json());
} catch (error) {
  const node = document.getElementById("trouble");
  node.textContent = error.message;
  node.hidden = false;
}

function show(api) {
  document.getElementById("version").textContent = api.info.version;
  prose(document.getElementById("about"), api.info.description);
  const routes = document.getElementById("routes");
  for (const tag of api.tags) {
    put(routes, element("h2", tag.name), element("p", tag.description));
    for (const [path, methods] of Object.entries(api.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        if (operation.tags?.[0] === tag.name) routes.append(route(api, method, path, operation));
      }
    }
  }
  const schemas = document.getElementById("schemas");
  for (const [name, schema] of Object.entries(api.components.schemas)) {
    const summary = element("summary", element("code", name), " ", prose(element("span"), schema.description));
    const section = element("details", summary, fields(schema));
    section.id = name;
    schemas.append(section);
  }
  schemas.hidden = false;
  openTarget();
  addEventListener("hashchange", openTarget);
}

function route(api, method, path, operation) {
  const body = operation.requestBody?.content["application/json"].schema;
  const schema = body && resolve(api, body);
  const section = element("details", element("summary", element("b", method.toUpperCase()), " ", element("code", path)));
  section.id = operation.operationId;
  section.className = "route";
  section.append(prose(element("p"), operation.description));
  if (schema) put(section, element("h3", "Body"), fields(schema));
  section.append(element("h3", "Answers"), answers(operation.responses), tryIt(method, path, operation, schema));
  return section;
}

function fields(schema) {
  const table = element("table", row("th", "field", "type", "meaning"));
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const needed = schema.required?.includes(name) ? element("small", " required") : "";
    table.append(row("td", element("span", element("code", name), needed), type(field), prose(element("span"), field.description)));
  }
  return table;
}

function answers(responses) {
  const table = element("table", row("th", "status", "content", "meaning"));
  for (const [status, response] of Object.entries(responses)) {
    const content = element("span");
    for (const [kind, media] of Object.entries(response.content ?? {})) {
      const events = kind === "text/event-stream" ? media.schema.anyOf : [];
      put(content, element("small", kind), " ", events.length ? "" : type(media.schema ?? {}), element("br"));
      for (const { properties } of events) {
        const data = properties.data.contentSchema ?? properties.data;
        put(content, `${properties.event?.const ?? "data"}: `, type(data), element("br"));
      }
    }
    table.append(row("td", status, content, prose(element("span"), response.description)));
  }
  return table;
}

// A type in words, with its limits; a reference is a link to its object.
function type(schema) {
  const node = element("span");
  if (schema.$ref) return put(node, link(schema.$ref));
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

// Limits of 64 bits are those of the format, and JavaScript would not show them right.
function limit(value, before) {
  return value === undefined || /\d{16}/.test(String(value)) ? "" : `${before}${value}`;
}

function link(reference) {
  const name = reference.split("/").pop();
  const anchor = element("a", element("code", name));
  anchor.href = `#${name}`;
  return anchor;
}

function resolve(api, schema) {
  return schema.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema;
}

function row(kind, ...cells) {
  return element("tr", ...cells.map((cell) => element(kind, cell)));
}

// `code` between backticks, and lines as they are.
function prose(node, text = "") {
  text.split(/`([^`]+)`/).forEach((part, i) => node.append(i % 2 ? element("code", part) : part));
  node.classList.add("prose");
  return node;
}

// A link leads to what is folded.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) target.open = true;
  target?.scrollIntoView();
}
