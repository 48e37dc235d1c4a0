! C = 2 A B of uneven blocks: slabs of rows of A, slabs of columns of B and C, two thirds of each on rank 0.
program blocks
    use mpi
    use pmm3d
    use, intrinsic :: iso_c_binding, only: c_int
    implicit none
    integer, parameter :: m = 23, n = 17, k = 11
    double precision, allocatable :: a(:, :), b(:, :), c(:, :), shard(:, :), of_b(:, :), of_c(:, :)
    double precision :: whole_a(m, k), whole_b(k, n), wanted(m, n)
    integer :: ierr, rank, size, i, grid, plan, boxes(4, 3), own(4, 3), matrices(3), wrong, total

    call MPI_Init(ierr)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
    call MPI_Comm_size(MPI_COMM_WORLD, size, ierr)
    whole_a = reshape([(mod(i, 7) - 3, i=1, m * k)], [m, k])
    whole_b = reshape([(mod(i, 5) - 2, i=1, k * n)], [k, n])
    wanted = 2 * matmul(whole_a, whole_b)

    boxes(:, 1) = [cut(m, rank) + 1, cut(m, rank + 1), 1, k]
    boxes(:, 2) = [1, k, cut(n, rank) + 1, cut(n, rank + 1)]
    boxes(:, 3) = [1, m, cut(n, rank) + 1, cut(n, rank + 1)]
    allocate (a(boxes(1, 1):boxes(2, 1), k), b(k, boxes(3, 2):boxes(4, 2)), c(m, boxes(3, 3):boxes(4, 3)))
    a = whole_a(boxes(1, 1):boxes(2, 1), :)
    b = whole_b(:, boxes(3, 2):boxes(4, 2))
    c = -1

    call check(pmm3d_grid(MPI_COMM_WORLD, 1, size, 1, grid))
    call check(pmm3d_box(grid, "A", m, k, own(:, 1)))
    call check(pmm3d_box(grid, "B", k, n, own(:, 2)))
    call check(pmm3d_box(grid, "C", m, n, own(:, 3)))
    allocate (shard(own(1, 1):own(2, 1), own(3, 1):own(4, 1)), of_b(own(1, 2):own(2, 2), own(3, 2):own(4, 2)), &
              of_c(own(1, 3):own(2, 3), own(3, 3):own(4, 3)))
    call check(pmm3d_matrix(grid, "d", m, k, "A", "F", shard, matrices(1)))
    call check(pmm3d_matrix(grid, "d", k, n, "B", "F", of_b, matrices(2)))
    call check(pmm3d_matrix(grid, "d", m, n, "C", "F", of_c, matrices(3)))
    call check(pmm3d_from_blocks(a, boxes(:, 1), "F", matrices(1)))
    call check(pmm3d_from_blocks(b, boxes(:, 2), "F", matrices(2)))
    call check(pmm3d_plan_matmul("N", "N", 1d0, matrices(1), matrices(2), 0d0, matrices(3), plan))
    call check(pmm3d_run(plan))
    shard = 2 * shard
    call check(pmm3d_run(plan))
    shard = shard / 2
    call check(pmm3d_free(plan))
    call check(pmm3d_to_blocks(matrices(3), c, boxes(:, 3), "F"))

    wrong = count(c /= wanted(:, boxes(3, 3):boxes(4, 3))) &
            + count(shard /= whole_a(own(1, 1):own(2, 1), own(3, 1):own(4, 1)))
    call MPI_Allreduce(wrong, total, 1, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD, ierr)
    boxes(2, 1) = min(boxes(2, 1) + 1, m) ! into the next rank's block
    if (size > 1 .and. pmm3d_from_blocks(a, boxes(:, 1), "F", matrices(1)) /= PMM3D_ERROR_ARGUMENT) total = total + 1
    if (rank == 0 .and. size > 1) print "(a)", pmm3d_last_error()
    if (rank == 0 .and. total == 0) print "(a)", "right"
    call check(pmm3d_finalize())
    call MPI_Finalize(ierr)

contains

    ! Two thirds of the rest for each rank, all of it for the last.
    integer function cut(length, part)
        integer, intent(in) :: length, part
        integer :: step
        cut = 0
        do step = 1, part
            cut = merge(length, cut + (2 * (length - cut)) / 3, step == size)
        end do
    end function

    subroutine check(code)
        integer(c_int), intent(in) :: code
        if (code == PMM3D_OK) return
        print "(a)", pmm3d_last_error()
        call MPI_Abort(MPI_COMM_WORLD, 1, ierr)
    end subroutine
end program
