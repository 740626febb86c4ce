// A request as a program in curl, Python or JavaScript, ready to paste and run. It takes the key from the variable
// INKSTREAM_KEY. Pure functions.

import { bodyOf, isLong } from "./request-body.js";

const WRITERS = { curl, python, node };
const TOKEN = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null/g;
const PYTHON = { true: "True", false: "False", null: "None" };

/** { language: label }, in the order of the menu. */
export const LANGUAGES = { curl: "curl", python: "Python", node: "JavaScript" };

/**
 * The program. `fields`: of requestFields() (request-body.js); `url`: of POST /complete; `keyed`: whether the service requires a
 * key. Several continuations are requested without streaming, since a terminal would mix them up.
 */
export function snippet(language, { url, fields, keyed }) {
  const several = fields.some(([name, json]) => name === "n" && json !== "1");
  const sent = fields.map(([name, json]) => [name, name === "stream" && several ? "false" : json]);
  return WRITERS[language]({ url, fields: sent, keyed, several });
}

// The body is in a here-document, which needs no quoting and has no length limit.
function curl({ url, fields, keyed }) {
  const key = keyed ? ' \\\n  -H "Authorization: Bearer $INKSTREAM_KEY"' : "";
  const head = `curl -N ${quoted(url)} \\\n  -H 'Content-Type: application/json'${key} \\\n  --data-binary @- <<'JSON'`;
  return `${head}\n${bodyOf(fields, "  ")}\nJSON\n`;
}

function python({ url, fields, keyed, several }) {
  const imports = [!several && "import json", keyed && "import os"].filter(Boolean);
  const pairs = fields.map(([name, json]) => `    ${JSON.stringify(name)}: ${pythonic(json)},`);
  const call = `${JSON.stringify(url)}, json=body${keyed ? ", headers=headers" : ""}, timeout=60`;
  return [
    "# Needs httpx: pip install httpx",
    ...(imports.length ? [...imports, ""] : []),
    "import httpx",
    "",
    ...["body = {", ...pairs, "}"],
    ...(keyed ? [`headers = {"Authorization": f"Bearer {os.environ['INKSTREAM_KEY']}"}`] : []),
    (several ? PYTHON_WHOLE : PYTHON_STREAM).replace("CALL", () => call),
  ].join("\n");
}

// JSON is valid Python except for three words.
function pythonic(json) {
  return json.replace(TOKEN, (token) => PYTHON[token] ?? token);
}

const PYTHON_WHOLE = `answer = httpx.post(CALL)
if answer.is_error:
    raise SystemExit(answer.json()["error"]["message"])
for choice in answer.json()["choices"]:
    print(f"[{choice['index']}] {choice['text']}")
`;

const PYTHON_STREAM = `with httpx.stream("POST", CALL) as answer:
    if answer.is_error:
        raise SystemExit(json.loads(answer.read())["error"]["message"])
    for line in answer.iter_lines():
        if line.startswith("data: "):
            data = json.loads(line.removeprefix("data: "))
            if "error" in data:
                raise SystemExit(data["error"]["message"])
            print(data.get("text", ""), end="", flush=True)
`;

function node({ url, fields, keyed, several }) {
  const key = keyed ? "\n    Authorization: `Bearer ${process.env.INKSTREAM_KEY}`," : "";
  const head = `// For Node 18 or newer, in a file that ends in .mjs\n${content(fields)}
const answer = await fetch(${JSON.stringify(url)}, {
  method: "POST",
  headers: {
    "Content-Type": "application/json",${key}
  },
  body,
});
if (!answer.ok) throw new Error((await answer.json()).error.message);
`;
  return head + (several ? SCRIPT_WHOLE : SCRIPT_STREAM);
}

// JavaScript rounds large integers and treats __proto__ specially: such a body stays a string.
function content(fields) {
  const all = fields.map(([, json]) => json).join(" ");
  const isText = (all.match(TOKEN) ?? []).some((token) => isLong(token) || token === '"__proto__"');
  if (!isText) return `const body = JSON.stringify(${bodyOf(fields, "  ")});`;
  const text = JSON.stringify(bodyOf(fields));
  return `// A string, since JavaScript would round its largest integers.\nconst body = ${text};`;
}

const SCRIPT_WHOLE = `const { choices } = await answer.json();
for (const { index, text } of choices) console.log(\`[\${index}] \${text}\`);
`;

const SCRIPT_STREAM = `let rest = "";
for await (const piece of answer.body.pipeThrough(new TextDecoderStream())) {
  const lines = (rest + piece).split("\\n");
  rest = lines.pop();
  for (const line of lines.filter((line) => line.startsWith("data: "))) {
    const data = JSON.parse(line.slice("data: ".length));
    if (data.error) throw new Error(data.error.message);
    process.stdout.write(data.text ?? "");
  }
}
`;

function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}
