// The extension module `freshet._native`: one `bind_*` per part of the core, nothing else.
#include "bindings.hpp"

NB_MODULE(_native, m) {
  // A process that ends by an exception leaks the objects of its frames. A report of these below the traceback would
  // become the exit reason.
  nanobind::set_leak_warnings(false);
  m.doc() = "The hot path of freshet: whole batches in, whole batches out, the GIL released.";
  freshet::bind_build(m);
  freshet::bind_plan(m);
  freshet::bind_store(m);
  freshet::bind_steps(m);
  freshet::bind_runs(m);
  freshet::bind_redis(m);
  freshet::bind_join(m);
  freshet::bind_model(m);
  freshet::bind_gate(m);
  freshet::bind_loop(m);
  freshet::bind_gather(m);
  freshet::bind_avro(m);
  freshet::bind_blocks(m);
  freshet::bind_features(m);
  freshet::bind_requests(m);
  freshet::bind_intake(m);
  freshet::bind_measures(m);
  freshet::bind_codec(m);
  freshet::bind_rank(m);
}
