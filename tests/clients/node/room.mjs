// What the Node programs share: a tool to use, and the report that a test reads.
import { readFileSync } from "node:fs";

export const MODEL = "policy";
export const DESCRIPTION = "Look somewhere in the room.";
export const PARAMETERS = {
  type: "object",
  properties: { at: { type: "string", description: "shelf, box or door" } },
  required: ["at"],
};
const ROOM = { shelf: "a red book", box: "a brass key", door: "it is locked" };

export const look = ({ at }) => ROOM[at];
export const task = () => process.argv[2];
export const wants = (word) => process.argv.slice(3).includes(word);

// What the test reads: `pieces` is how many parts the last answer came in.
export function report(name, answer, pieces = 0) {
  const manifest = new URL(`./node_modules/${name}/package.json`, import.meta.url);
  const { version } = JSON.parse(readFileSync(manifest, "utf8"));
  console.log(JSON.stringify({ version, answer, pieces }));
}
