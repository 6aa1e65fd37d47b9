// What can be chosen, and what stands behind curves and below them: weather, absences.

const press = (button, isOn) => button.setAttribute("aria-pressed", String(isOn));

/** A button that is on or off. */
function toggle(content, isOn, change) {
  const button = element("button", { type: "button", "aria-pressed": String(isOn) }, ...[content].flat());
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    press(button, on);
    change(on, button);
  });
  return button;
}

/** Buttons of which one is on. */
function choice(label, texts, chosen, choose) {
  const buttons = Object.entries(texts).map(([value, text]) => toggle(text, value === chosen, (_, pressed) => {
    buttons.forEach((each) => press(each, each === pressed));
    choose(value);
  }));
  return element("div", { class: "choice", role: "group", "aria-label": label }, ...buttons);
}

function selection(label, texts, choose) {
  const select = element("select", { "aria-label": label },
    ...Object.entries(texts).map(([value, text]) => element("option", { value }, text)));
  select.addEventListener("change", () => choose(select.value));
  return select;
}

/** Grey where links or hosts were down or slow; a strategy's colour at the foot where ranks were away. */
function shading(alignment, curves) {
  return (context, plot) => {
    const { bbox } = plot;
    const fill = (begin, end, colour, top, height) => {
      const [left, right] = [begin, end ?? plot.scales.x.max].map((place) => plot.valToPos(place, "x", true));
      context.fillStyle = colour;
      context.fillRect(left, top, Math.max(right - left, 1), height);
    };
    if (alignment === "time") {
      for (const [begin, end, share] of payload.shade) fill(begin, end, `rgba(60, 66, 72, ${0.16 * (1 - share)})`, bbox.top, bbox.height);
    }
    const high = 7 * (devicePixelRatio || 1);
    for (const curve of curves) {
      for (const absence of curve.absences || []) {
        if (absence[alignment]) fill(...absence[alignment], curve.colour + "88", bbox.top + bbox.height - high, high);
      }
    }
  };
}

function remarks(alignment, curves) {
  return (at) => {
    const found = [];
    if (alignment === "time") {
      for (const { name, spans } of payload.weather) {
        const span = spans.find(([begin, end]) => begin <= at && at < end);
        if (span) found.push(`${name}: ${span[2] === 0 ? "down" : `${Math.round(span[2] * 100)} % left`}`);
      }
    }
    for (const curve of curves) {
      const ranks = (curve.absences || [])
        .filter((each) => each[alignment] && each[alignment][0] <= at && at < (each[alignment][1] ?? Infinity))
        .map((each) => each.rank);
      if (ranks.length) found.push(`${curve.name}: without rank ${ranks.join(", ")}`);
    }
    return found.length ? `; ${found.join("; ")}` : "";
  };
}
