/** Prints the tree of errors as JSON: name, code and parent of each. */

import { ERROR_CLASSES } from "../src/errors.js";

const tree = [...ERROR_CLASSES.values()].map((one) => [one.name, one.code, Object.getPrototypeOf(one).name]);
console.log(JSON.stringify(tree));
