// What links carried.

/** From grey-blue (a thousandth of what a link can carry, or less) over amber (3 %) to red (all of it). */
function colourOfUse(share) {
  const stops = [[0xa9, 0xb7, 0xc2], [0xe6, 0x9f, 0x00], [0xb0, 0x1c, 0x1c]];
  const at = share > 0 ? Math.min(Math.max(1 + Math.log10(share) / 3, 0), 1) * 2 : 0;
  const [low, high] = at < 1 ? [stops[0], stops[1]] : [stops[1], stops[2]];
  return `rgb(${low.map((value, channel) => Math.round(value + (high[channel] - value) * (at < 1 ? at : at - 1))).join(",")})`;
}

function showLinks(parent) {
  let run = use[0];
  const count = Object.values(run.links)[0].length;
  const slider = element("input", { type: "range", min: 0, max: count - 1, value: 0, id: "instant" });
  const line = element("p", { class: "readout" });
  const draw = () => {
    const now = Number(slider.value);
    for (const link of document.querySelectorAll("svg .link")) {
      const shares = run.links[link.dataset.link];
      link.style.stroke = colourOfUse(shares ? shares[now] : 0);
    }
    const shares = Object.entries(run.links).map(([name, each]) => [name, each[now]]);
    const [busiest, share] = shares.reduce((one, other) => (other[1] > one[1] ? other : one));
    const [begin, end] = [now * run.span_seconds, (now + 1) * run.span_seconds];
    line.textContent = `${seconds(begin, 3)} to ${seconds(end, 3)}: ` +
      (share > 0 ? `busiest is ${busiest.replace("->", " to ")} with ${number(share * 100, 2)} % of what it can carry` : "nothing is sent");
  };
  slider.addEventListener("input", draw);
  if (use.length > 1) {
    const names = use.map((each) => each.name);
    parent.append(selection("Whose use of the network", names, (position) => { run = use[position]; draw(); }));
  }
  parent.append(element("label", { for: "instant" }, "Load of links at: "), slider, line,
    element("p", { class: "note" }, "Grey: 0.1 % of what a link can carry, or less; amber: 3 %; red: all of it."));
  parent.hidden = false;
  draw();
}
