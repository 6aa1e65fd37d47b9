// Simulates a list of transfers on SimGrid as a plain fluid, for benchmarks/network.py.
//   simgrid_flows CASE.txt RESULT.txt [SimGrid options]
// CASE.txt: "hosts links routes flows"; links "bytes_per_second latency_seconds"; routes "src dst n link..."; flows
// "start_s src dst bytes", by start. RESULT.txt: finish_s of each. Prints the seconds that simulating took, set-up apart.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>
#include <simgrid/s4u.hpp>

namespace sg4 = simgrid::s4u;

struct Flow {
  double start, bytes;
  int src, dst;
};

int main(int argc, char** argv)
{
  sg4::Engine engine(&argc, argv);
  for (const char* setting : {"network/model:CM02", "network/latency-factor:1", "network/bandwidth-factor:1",
                              "network/weight-S:0", "network/TCP-gamma:0", "network/crosstraffic:0"})
    sg4::Engine::set_config(setting);
  std::ifstream in(argv[1]);
  int hosts, links, routes, flows;
  in >> hosts >> links >> routes >> flows;
  auto* zone = sg4::create_full_zone("net");
  std::vector<sg4::Host*> host;
  for (int i = 0; i < hosts; i++)
    host.push_back(zone->create_host("h" + std::to_string(i), 1e9));
  std::vector<const sg4::Link*> link;
  for (int i = 0; i < links; i++) {
    double rate, latency;
    in >> rate >> latency;
    link.push_back(zone->create_link("l" + std::to_string(i), rate)->set_latency(latency)->seal());
  }
  for (int i = 0; i < routes; i++) {
    int src, dst, hops, number;
    in >> src >> dst >> hops;
    std::vector<sg4::LinkInRoute> way;
    for (int k = 0; k < hops; k++) {
      in >> number;
      way.emplace_back(link[number]);
    }
    zone->add_route(host[src]->get_netpoint(), host[dst]->get_netpoint(), nullptr, nullptr, way, false);
  }
  zone->seal();
  std::vector<Flow> flow(flows);
  for (auto& f : flow)
    in >> f.start >> f.src >> f.dst >> f.bytes;

  std::vector<sg4::CommPtr> comm;
  sg4::Actor::create("starter", host[0], [&]() {
    for (const auto& f : flow) {
      if (f.start > sg4::Engine::get_clock())
        sg4::this_actor::sleep_until(f.start);
      comm.push_back(sg4::Comm::sendto_async(host[f.src], host[f.dst], static_cast<uint64_t>(f.bytes)));
    }
    for (const auto& c : comm)
      c->wait();
  });
  auto begin = std::chrono::steady_clock::now();
  engine.run();
  std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  FILE* out = fopen(argv[2], "w");
  for (const auto& c : comm)
    fprintf(out, "%.9f\n", c->get_finish_time());
  fclose(out);
  printf("%.6f\n", taken.count());
  return 0;
}
