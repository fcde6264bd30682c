// How many blocks of a kernel fit on one multiprocessor. The arithmetic is that of tuner/occupancy/calculator.py, line
// by line; a test compares both in every row of a generated table.
BT.KIB = 1024;
BT.LIMITERS = ["warps", "blocks", "registers", "shared_memory", "barriers"];
BT.roundUp = (value, unit) => Math.ceil(value / unit) * unit;
BT.over = (value, unit) => Math.floor(value / unit);

BT.blockSharedBytes = (kernel, limits) => {
  const asked = kernel.shared_bytes + kernel.static_shared_bytes;
  return BT.roundUp(asked + limits.shared_reserved_bytes, limits.shared_unit_bytes);
};

// The carve-out: the preference rounded up to a supported size, which must hold one block.
BT.capacityBytes = (blockBytes, limits, percent) => {
  if (percent === null) return limits.shared_per_sm_bytes;
  const wanted = Math.max(BT.over(percent * limits.shared_per_sm_bytes, 100), blockBytes);
  const sizes = limits.carveouts_kib.map((kib) => kib * BT.KIB).filter((size) => size >= wanted);
  return sizes.length ? Math.min(...sizes) : limits.shared_per_sm_bytes;
};

BT.sharedLimit = (blockBytes, capacity, limits) => {
  if (blockBytes === 0) return null;
  const fits = blockBytes <= limits.shared_per_block_optin_bytes + limits.shared_reserved_bytes;
  return fits ? BT.over(capacity, blockBytes) : 0;
};

// Registers are handed out per warp, and a warp lives in one sub-partition with its own share of the file.
BT.registerLimit = (kernel, limits, hardware) => {
  if (kernel.registers === 0) return null;
  const perWarp = BT.roundUp(kernel.registers * hardware.warp_size, hardware.register_unit);
  const perBlock = perWarp * BT.roundUp(kernel.num_warps, limits.sub_partitions);
  const launchable = hardware.max_registers_per_thread + 1;
  if (kernel.registers > launchable || perBlock > limits.registers_per_block) return 0;
  const warps = BT.over(BT.over(limits.registers_per_sm, limits.sub_partitions), perWarp) * limits.sub_partitions;
  return BT.over(warps, kernel.num_warps);
};

BT.barrierLimit = (kernel, limits) =>
  limits.barriers_per_sm === null || kernel.barriers === 0 ? null : BT.over(limits.barriers_per_sm, kernel.barriers);

BT.occupancy = (kernel, limits, hardware, percent = null) => {
  const blockShared = BT.blockSharedBytes(kernel, limits);
  const capacity = BT.capacityBytes(blockShared, limits, percent);
  const threadsFit = hardware.warp_size * kernel.num_warps <= hardware.max_threads_per_block;
  const by = {
    warps: threadsFit ? BT.over(limits.max_warps_per_sm, kernel.num_warps) : 0,
    blocks: limits.max_blocks_per_sm,
    registers: BT.registerLimit(kernel, limits, hardware),
    shared_memory: BT.sharedLimit(blockShared, capacity, limits),
    barriers: BT.barrierLimit(kernel, limits),
  };
  const blocks = Math.min(...Object.values(by).filter((limit) => limit !== null));
  return {
    by,
    blocks,
    binding: BT.LIMITERS.filter((name) => by[name] === blocks),
    warps: blocks * kernel.num_warps,
    blockShared,
    capacity,
  };
};

// The most registers per thread with which `blocks` blocks are resident; null if no number is small enough.
BT.registersFor = (blocks, numWarps, limits, hardware) => {
  const warpsEach = Math.ceil((blocks * numWarps) / limits.sub_partitions);
  const bySm = BT.over(BT.over(limits.registers_per_sm, limits.sub_partitions), warpsEach);
  const byLaunch = BT.over(limits.registers_per_block, BT.roundUp(numWarps, limits.sub_partitions));
  const unit = hardware.register_unit;
  const registers = BT.over(BT.over(Math.min(bySm, byLaunch), unit) * unit, hardware.warp_size);
  return Math.min(registers, hardware.max_registers_per_thread) || null;
};

// The most shared memory of a block with which `blocks` blocks are resident; null if an empty block is too large.
BT.sharedBytesFor = (blocks, limits, percent = null) => {
  const capacity = BT.capacityBytes(1, limits, blocks === 1 ? null : percent);
  const unit = limits.shared_unit_bytes;
  const each = BT.over(BT.over(capacity, blocks), unit) * unit - limits.shared_reserved_bytes;
  return each >= 0 ? Math.min(each, limits.shared_per_block_optin_bytes) : null;
};

BT.requirement = (blocks, numWarps, limits, hardware, percent = null) => ({
  blocks,
  registers: BT.registersFor(blocks, numWarps, limits, hardware),
  shared_bytes: BT.sharedBytesFor(blocks, limits, percent),
  num_warps:
    Math.min(BT.over(limits.max_warps_per_sm, blocks), BT.over(hardware.max_threads_per_block, hardware.warp_size)) ||
    null,
  barriers: limits.barriers_per_sm === null ? null : BT.over(limits.barriers_per_sm, blocks) || null,
});
