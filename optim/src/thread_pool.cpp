#include "thread_pool.hpp"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace optim {
namespace {

// Round to nearest, denormals kept: what torch.set_flush_denormal or anyone else set for this thread changes no result.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

// A thread inherits the mask of its creator. Signals belong to Python's threads: a handler must not run on ours.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;

 private:
  sigset_t saved_;
};

}  // namespace

struct ThreadPool::Workers {
  explicit Workers(int num_workers) {
    const AllSignalsBlocked guard;
    try {
      for (int i = 0; i < num_workers; ++i) threads.emplace_back([this] { work(); });
    } catch (const std::system_error& error) {
      const std::size_t num_started = threads.size();
      stop();
      throw std::system_error(error.code(), "cannot start kernel thread " + std::to_string(num_started + 1) + " of " +
                                                std::to_string(num_workers) +
                                                "; lower num_threads or raise the limit on processes (ulimit -u)");
    }
  }
  ~Workers() { stop(); }

  void run(std::size_t count, const std::function<void(std::size_t)>& work_on_block) {
    {
      const std::lock_guard lock(mutex);
      body = &work_on_block;
      num_tiles = count;
      next_tile = 0;
      ++job;
    }
    job_ready.notify_all();
    drain(work_on_block);
    std::unique_lock lock(mutex);
    body = nullptr;
    job_done.wait(lock, [this] { return num_busy == 0; });
  }

  std::vector<std::thread> threads;

 private:
  void drain(const std::function<void(std::size_t)>& work_on_block) {
    for (;;) {
      const std::size_t tile = next_tile.fetch_add(1, std::memory_order_relaxed);
      if (tile >= num_tiles) return;
      work_on_block(tile);
    }
  }

  void work() {
    const DefaultFloatEnvironment environment;
    std::uint64_t last_job = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      job_ready.wait(lock, [&] { return stopping || (body && job != last_job); });
      if (stopping) return;
      last_job = job;
      ++num_busy;
      const auto* work_on_block = body;
      lock.unlock();
      drain(*work_on_block);
      lock.lock();
      if (--num_busy == 0) job_done.notify_one();
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    job_ready.notify_all();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  std::mutex mutex;
  std::condition_variable job_ready, job_done;
  // Of the job under way; null when all of its tiles are taken. On a busy machine a worker may wake after that: nobody
  // waits for it, and it goes back to sleep.
  const std::function<void(std::size_t)>* body = nullptr;
  std::size_t num_tiles = 0;
  std::atomic<std::size_t> next_tile = 0;
  std::size_t num_busy = 0;  // workers in the job
  std::uint64_t job = 0;
  bool stopping = false;
};

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads), owner_(getpid()) {
  if (num_threads < 1) throw std::invalid_argument("num_threads is " + std::to_string(num_threads) + "; at least 1");
}

ThreadPool::~ThreadPool() {
  if (!forked()) delete workers_;
}

bool ThreadPool::forked() const { return getpid() != owner_; }

void ThreadPool::end_workers() {
  if (forked()) return;
  const std::lock_guard lock(turn_);
  delete workers_;
  workers_ = nullptr;
}

int ThreadPool::num_workers() {
  if (forked()) return 0;
  const std::lock_guard lock(turn_);
  return workers_ ? static_cast<int>(workers_->threads.size()) : 0;
}

void ThreadPool::parallel_for(std::size_t num_tiles, const std::function<void(std::size_t)>& body) {
  const DefaultFloatEnvironment environment;
  // In a forked child not even the mutex can be trusted: another thread may have held it at the fork.
  if (num_tiles <= 1 || num_threads_ == 1 || forked()) {
    for (std::size_t tile = 0; tile < num_tiles; ++tile) body(tile);
    return;
  }
  const std::lock_guard lock(turn_);
  if (!workers_) workers_ = new Workers(num_threads_ - 1);
  workers_->run(num_tiles, body);
}

}  // namespace optim
