// Ticks of logarithmic axes, and places that a chart can take.

/** Round numbers between two positive ones, so few that they can be read. */
function logTicks(least, most, count) {
  const sets = [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]];
  let ticks = [];
  for (const steps of sets) {
    ticks = [];
    for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power++) {
      for (const step of steps) {
        const tick = Number((step * 10 ** power).toPrecision(3));
        if (tick >= least * 0.999 && tick <= most * 1.001) ticks.push(tick);
      }
    }
    if (ticks.length <= count) break;
  }
  const stride = Math.ceil(ticks.length / count);
  return ticks.filter((_, position) => position % stride === 0);
}

/** Whether curves end so far apart that only a logarithmic axis shows all of them. */
function farApart(curves) {
  const ends = curves.map((curve) => curve.x.at(-1)).filter((end) => end > 0);
  return Math.max(...ends) > 12 * Math.min(...ends);
}

/** uPlot wants places that rise: those that stand still are moved by what nobody sees. */
function rising(places) {
  const tiny = Math.max(1e-12, (places.at(-1) || 1) * 1e-9);
  let last = -Infinity;
  return places.map((place) => (last = place > last ? place : last + tiny));
}
