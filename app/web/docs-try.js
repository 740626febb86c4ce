// A form that sends one request of a route and shows the answer as it arrives, with the same request for a shell.
// The form is built from the route's description in openapi.json.

import { classed, element, put } from "./elements.js";
import { copy, REFUSED } from "./request/clipboard.js";

const STREAM_ID = /^id: (\S+):(\d+)$/m;

/** The form of one operation; `examples`: of its body, if it has one: { title: { value } }. */
export function tryIt(method, path, operation, examples) {
  const form = element("form");
  form.setAttribute("aria-label", `Try ${method.toUpperCase()} ${path}`);
  const body = bodyField(form, Object.entries(examples));
  const optional = classed("details", "optional", element("summary", "Optional headers"));
  const inputs = (operation.parameters ?? []).map((parameter) => input(body ? optional : form, parameter));
  const send = classed("button", "primary", "Send");
  const copyCommand = classed("button", "quiet", "Copy");
  copyCommand.type = "button";
  const [curl, status, answer] = [classed("pre", "curl"), classed("p", "status"), classed("pre", "answer")];
  status.setAttribute("role", "status");
  for (const scrolled of [curl, answer]) scrolled.tabIndex = 0;
  curl.setAttribute("aria-label", "The request as a curl command");
  answer.setAttribute("aria-label", "Response");
  put(form, classed("p", "send", send, status), answer, classed("div", "command", curl, copyCommand));
  if (body && inputs.length) form.append(optional);

  const request = () => ({ method, address: address(path, inputs), headers: headers(body, inputs), body: body?.value });
  const draw = () => (curl.textContent = command(request()));
  for (const control of [form, document.getElementById("key")]) control.addEventListener("input", draw);
  draw();
  copyCommand.addEventListener("click", async () => {
    copyCommand.textContent = (await copy(curl.textContent)) ? "Copied" : REFUSED;
  });
  let running = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return running.abort();
    running = new AbortController();
    send.textContent = "Stop";
    await run(request(), status, answer, running.signal);
    running = null;
    send.textContent = "Send";
  });
  return form;
}

/** Fills the parameters with these names on all forms, except for those that the user has changed. */
export function fillParameters(values) {
  for (const [name, value] of Object.entries(values)) {
    for (const field of document.querySelectorAll(`input[name="${name}"]`)) {
      if (value === undefined || field.dataset.typed) continue;
      field.value = value;
      field.form.dispatchEvent(new Event("input"));
    }
  }
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
    const stream = STREAM_ID.exec(answer.textContent);
    if (stream) fillParameters({ request_id: stream[1], "last-event-id": `${stream[1]}:${stream[2]}` });
    pretty(answer, response.headers.get("content-type") ?? "");
    status.textContent = `${code}, ${Math.round(performance.now() - began)} ms`;
  } catch (error) {
    status.textContent = error.name === "AbortError" ? "stopped" : "The service cannot be reached, or the connection broke.";
  }
}

function headers(body, inputs) {
  const key = document.getElementById("key").value;
  const given = inputs.filter(({ parameter, field }) => parameter.in === "header" && field.value);
  return {
    ...(body ? { "content-type": "application/json" } : {}),
    ...(key ? { authorization: `Bearer ${key}` } : {}),
    ...Object.fromEntries(given.map(({ parameter, field }) => [parameter.name, field.value])),
  };
}

// Not for numbers with more digits than JavaScript keeps: a seed must be shown exactly.
function pretty(output, kind) {
  const text = output.textContent;
  if (!kind.startsWith("application/json") || text.length > 1e6 || /\d{16}/.test(text)) return;
  output.textContent = JSON.stringify(JSON.parse(output.textContent), null, 2);
}

function input(form, parameter) {
  const field = element("input");
  field.name = parameter.name;
  field.required = parameter.required ?? false;
  field.autocomplete = "off";
  field.addEventListener("input", () => (field.dataset.typed = "true"));
  const note = parameter.description ? element("small", parameter.description) : "";
  form.append(classed("p", "parameter", element("label", element("code", parameter.name), field), note));
  return { parameter, field };
}

// The body, with a button for each example; it begins with the first.
function bodyField(form, examples) {
  if (!examples.length) return null;
  const field = element("textarea");
  field.spellcheck = false;
  field.setAttribute("aria-label", "Body");
  const choices = classed("div", "examples");
  choices.setAttribute("role", "group");
  choices.setAttribute("aria-label", "Examples");
  const choose = (index) => {
    field.value = JSON.stringify(examples[index][1].value, null, 2);
    field.rows = Math.max(4, field.value.split("\n").length + 1);
    [...choices.children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === index)));
    form.dispatchEvent(new Event("input"));
  };
  for (const [index, [title]] of examples.entries()) {
    const button = element("button", title);
    button.type = "button";
    button.addEventListener("click", () => choose(index));
    choices.append(button);
  }
  put(form, ...(examples.length > 1 ? [choices] : []), field);
  choose(0);
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
