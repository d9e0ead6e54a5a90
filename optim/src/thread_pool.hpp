// A few threads of our own for the kernels: no second OpenMP runtime beside torch's.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <mutex>

namespace optim {

// Threads start with the first call that has work for them. A forked child has none of them, so there the pool runs
// everything in the caller.
class ThreadPool {
 public:
  // num_threads counts the caller, who works too. Throws std::invalid_argument below 1.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // body(0) ... body(num_tiles - 1), each once, in any order, on any thread, in the default floating-point environment.
  // body must not throw. Calls from several threads take turns. Throws std::system_error if a thread cannot be started.
  void parallel_for(std::size_t num_tiles, const std::function<void(std::size_t)>& body);

  int num_threads() const { return num_threads_; }
  // Ends the threads; a later call starts them again.
  void end_workers();

  // Threads running now, besides the caller's.
  int num_workers();

 private:
  struct Workers;

  bool forked() const;

  const int num_threads_;
  const pid_t owner_;
  std::mutex turn_;
  Workers* workers_ = nullptr;  // raw, because a forked child must leak it: the threads to join are not there
};

}  // namespace optim
