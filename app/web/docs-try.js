// A form that sends one request of a route and shows the answer as it arrives, with the same request for a shell.
// The form is built from the route's description in openapi.json.

import { element, put } from "./elements.js";

/** The form of one operation; `schema` is that of its body, if it has one. */
export function tryIt(method, path, operation, schema) {
  const form = element("form", element("h3", "Try it"));
  const inputs = (operation.parameters ?? []).map((parameter) => input(form, parameter));
  const body = schema && area(form, JSON.stringify(example(schema), null, 2));
  const [send, stop] = [element("button", "Send"), element("button", "Stop")];
  stop.type = "button";
  stop.disabled = true;
  const [curl, status, answer] = [element("pre"), element("p"), element("pre")];
  curl.className = "curl";
  status.className = "status";
  answer.className = "answer";
  status.setAttribute("role", "status");
  put(form, element("p", send, " ", stop), curl, status, answer);

  const request = () => ({ method, address: address(path, inputs), headers: headers(body, inputs), body: body?.value });
  const draw = () => (curl.textContent = command(request()));
  for (const control of [form, document.getElementById("key")]) control.addEventListener("input", draw);
  draw();
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const abort = new AbortController();
    stop.onclick = () => abort.abort();
    [send.disabled, stop.disabled] = [true, false];
    await run(request(), status, answer, abort.signal);
    [send.disabled, stop.disabled] = [false, true];
  });
  return form;
}

async function run({ method, address, headers, body }, status, answer, signal) {
  const began = performance.now();
  answer.textContent = "";
  status.textContent = "waiting";
  try {
    const response = await fetch(address, { method: method.toUpperCase(), headers, body, signal, cache: "no-store" });
    const code = `${response.status} ${response.statusText}`.trim();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      status.textContent = `${code}, receiving`;
      answer.append(piece.value);
      answer.scrollTop = answer.scrollHeight;
    }
    pretty(answer, response.headers.get("content-type") ?? "");
    status.textContent = `${code}, ${Math.round(performance.now() - began)} ms`;
  } catch (error) {
    status.textContent = error.name === "AbortError" ? "stopped" : "The service cannot be reached, or broke off.";
  }
}

function headers(body, inputs) {
  const key = document.getElementById("key").value;
  const given = inputs.filter(({ parameter, field }) => parameter.in === "header" && field.value);
  return {
    ...(body === undefined ? {} : { "content-type": "application/json" }),
    ...(key ? { authorization: `Bearer ${key}` } : {}),
    ...Object.fromEntries(given.map(({ parameter, field }) => [parameter.name, field.value])),
  };
}

// Not where a number has more digits than JavaScript keeps: a seed must be shown as it is.
function pretty(output, kind) {
  const text = output.textContent;
  if (!kind.startsWith("application/json") || text.length > 1e6 || /\d{16}/.test(text)) return;
  output.textContent = JSON.stringify(JSON.parse(output.textContent), null, 2);
}

// The required fields with their examples: enough to be sent.
function example(schema) {
  const names = schema.required ?? [];
  return Object.fromEntries(names.map((name) => [name, schema.properties[name].examples?.[0] ?? null]));
}

function input(form, parameter) {
  const field = element("input");
  field.name = parameter.name;
  field.required = parameter.required ?? false;
  field.autocomplete = "off";
  form.append(element("p", element("label", `${parameter.name} `, field), ` ${parameter.description ?? ""}`));
  return { parameter, field };
}

function area(form, text) {
  const field = element("textarea");
  field.value = text;
  field.rows = Math.min(12, text.split("\n").length + 2);
  field.spellcheck = false;
  field.setAttribute("aria-label", "Body");
  form.append(field);
  return field;
}

function address(path, inputs) {
  let filled = path.slice(1);
  const query = new URLSearchParams();
  for (const { parameter, field } of inputs) {
    // A slash in a name is a part of it.
    if (parameter.in === "path") filled = filled.replace(`{${parameter.name}}`, encodeURIComponent(field.value));
    else if (parameter.in === "query" && field.value) query.set(parameter.name, field.value);
  }
  return query.size ? `${filled}?${query}` : filled;
}

function command({ method, address, headers, body }) {
  const url = quoted(new URL(address, document.baseURI).href);
  const verb = method === "get" || method === "post" ? "" : ` -X ${method.toUpperCase()}`;
  const lines = Object.entries(headers).map(([name, value]) => ` -H ${quoted(`${name}: ${value}`)}`);
  return `curl -N${verb} ${url}${lines.join("")}${body === undefined ? "" : ` -d ${quoted(body)}`}`;
}

function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}
