// The curves, and what all workers sent over time.

function showCurves(section) {
  const state = { align: payload.align, measure: Object.keys(payload.measures)[0], logX: null, logY: true };
  const chart = new Chart(section);
  const tools = element("div", { class: "tools" });
  const reset = element("button", { type: "button", disabled: true }, "Show all");
  reset.addEventListener("click", () => chart.reset());
  chart.zoomed = () => { reset.disabled = !chart.isZoomed; };
  const logX = toggle("log x", false, (on) => { state.logX = on; draw(); });
  const logY = toggle("log y", true, (on) => { state.logY = on; draw(); });

  function draw() {
    const curves = payload.curves
      .filter((each) => each.measures[state.measure] && each.measures[state.measure][state.align])
      .map((each) => {
        const { [state.align]: x, value: y, least, most } = each.measures[state.measure];
        return { ...each, x, y, least, most };
      });
    const isLog = state.logX ?? farApart(curves);
    press(logX, isLog);
    chart.show({
      curves,
      label: `${payload.measures[state.measure]} against ${ALIGNMENTS[state.align]}`,
      x: { label: ALIGNMENTS[state.align], write: WRITE[state.align], log: isLog },
      y: { write: number, log: state.logY },
      target: state.measure === "loss" ? payload.target : null,
      shade: shading(state.align, curves),
      remark: remarks(state.align, curves),
    });
  }

  const alignments = Object.fromEntries(payload.alignments.map((name) => [name, name]));
  tools.append(choice("Align by", alignments, state.align, (value) => { state.align = value; state.logX = null; draw(); }));
  if (Object.keys(payload.measures).length > 1) {
    tools.append(selection("What is shown", payload.measures, (measure) => {
      state.measure = measure;
      state.logY = measure !== "accuracy";
      press(logY, state.logY);
      draw();
    }));
  }
  tools.append(logX, logY, reset);
  section.querySelector("h2").after(tools);
  section.append(element("p", { class: "note" },
    "Drag to zoom, double-click or \u201cShow all\u201d to go back; names switch curves on and off. " +
    (payload.curves.some((each) => each.runs > 1) ? "Lines are means over runs, bands go from the lowest to the highest. " : "") +
    (payload.weather.length ? "Grey: a link or host was down or slow. " : "") +
    (payload.curves.some((each) => each.absences.length) ? "Colour at the foot: ranks were away (first run). " : "") +
    (payload.left_out ? `${payload.left_out} more groups are in the table only. ` : "")));
  section.hidden = false;
  draw();
  return chart;
}

function showUse(section) {
  const known = payload.curves.filter((each) => each.use);
  if (!known.length) return null;
  section.append(element("h2", {}, "Use of the network over time"));
  const tools = element("div", { class: "tools" });
  const chart = new Chart(section);
  const state = { what: "sent" };
  const draw = () => {
    const curves = known.filter((each) => each.use[state.what]).map((each) => ({
      ...each, x: [0, ...each.use.seconds], y: [each.use[state.what][0], ...each.use[state.what]], stepped: true,
    }));
    chart.show({
      curves,
      label: `Bits per second that all workers sent, against ${ALIGNMENTS.time}`,
      x: { label: ALIGNMENTS.time, write: seconds, log: farApart(curves) },
      y: { write: rate, log: false },
      shade: shading("time", curves),
      remark: remarks("time", curves),
    });
  };
  if (known.some((each) => each.use.wan)) {
    tools.append(choice("What is counted", { sent: "all workers", wan: "between regions" }, "sent", (value) => { state.what = value; draw(); }));
    section.insertBefore(tools, chart.plotted);
  }
  section.append(element("p", { class: "note" },
    "Payload that workers sent a second, means over sixtieths of each run (of the first, where there are several)."));
  draw();
  return chart;
}
