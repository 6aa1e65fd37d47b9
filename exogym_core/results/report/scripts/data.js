// Data of the page.

document.documentElement.classList.add("js");
const { curves: payload, use, trace } = JSON.parse(document.getElementById("data").textContent);
const ALIGNMENTS = { time: payload ? payload.clock : "virtual time", steps: "steps", bytes: "sent by a worker" };
