// sampled() for tests in Python: JSON cases on stdin, JSON answers on stdout.

import { readFileSync } from "node:fs";
import { sampled } from "../../app/web/tokens/sampling.js";

const cases = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map(({ top, vocabulary, settings }) => sampled(top, vocabulary, settings))));
